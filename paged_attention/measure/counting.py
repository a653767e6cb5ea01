"""Count what a call asks of the device: operations, GEMMs, host reads, and peak bytes.

Counts are exact. They are the same on every device and on `meta` tensors, which hold no data. So
what a step costs at 100,000 tokens can be counted on a machine that has no memory for them.

    counts = count(lambda: paged_attention(query, key_cache, ...))
    counts.ops, counts.gemms, counts.host_reads, counts.peak_bytes, counts.largest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attention.measure.storages import LiveBytes, storage_bytes


@dataclass(frozen=True)
class Counts:
    """What one call did, as `OpCounter` defines it.

    ops:        ATen operations dispatched below autograd, without views and empty*/new_empty*
    gemms:      of those, mm, addmm, bmm, baddbmm, mv, addmv and dot
    host_reads: of those, the ones that make the host wait for a value
    peak_bytes: the most bytes that the call's own storages held at once
    largest:    elements of the largest tensor that an operation made or wrote; views don't count
    by_op:      how often each operation ran, by its name without the overload: {"bmm": 2, ...}
    devices:    the devices that the operations' tensors live on: {"cpu", "cuda:0"}
    """

    ops: int
    gemms: int
    host_reads: int
    peak_bytes: int
    largest: int
    by_op: Mapping[str, int] = field(repr=False)
    devices: frozenset[str] = field(repr=False)


def count(fn: Callable[[], object]) -> Counts:
    """Run a call once and count what it does.

    Args:    fn: takes no arguments; what it returns is dropped
    Returns: Counts, of this one call
    Raises:  whatever fn raises
    Cost:    one call of fn, and some 10 microseconds of Python an operation

    Example:
        >>> x = torch.ones(3, 5)
        >>> count(lambda: (x @ x.t()).sum().item())
        Counts(ops=3, gemms=1, host_reads=1, peak_bytes=40, largest=9)
    """
    with OpCounter() as counter:
        fn()
    return counter.counts()


class OpCounter(TorchDispatchMode):
    """A dispatch mode that counts every operation below autograd while it is on.

    An operation is counted unless it only makes a view (its schema says that its result aliases
    an argument which it doesn't write to) or only asks for memory (`empty*`, `new_empty*`). Fills,
    copies and host reads count. Composite operations count as the ones that they are made of, in
    inference mode too.

    A host read is `_local_scalar_dense` (`.item()`, `int(t)`, `bool(t)`), `equal`, `nonzero`, or a
    copy from another device to the CPU.

    `peak_bytes` adds up the storages that operations allocated, see `storages.LiveBytes`. Views,
    in-place and `out=` operations add nothing, and neither does what was alive before the mode was
    entered. Bytes are those that were asked for; an allocator rounds them up.

    It can't see what happens inside a kernel, such as the copy that `bmm` makes of an operand
    whose strides it can't read, or the `nonzero` inside indexing with a bool mask (see
    `profiling.profiler_peak_bytes`). Nor can it see `.tolist()` and `.numpy()` of a CPU tensor,
    which read memory without an operation, other threads' work, or code that `torch.compile` has
    turned into kernels of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self.ops = self.gemms = self.host_reads = self.largest = 0
        self.devices: set[str] = set()
        self._live_bytes = LiveBytes()

    @property
    def peak_bytes(self) -> int:
        return self._live_bytes.peak

    def counts(self) -> Counts:
        """What has been counted so far."""
        numbers = (self.ops, self.gemms, self.host_reads, self.peak_bytes, self.largest)
        return Counts(*numbers, by_op=dict(self.by_op), devices=frozenset(self.devices))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # reached in inference mode only; elsewhere autograd splits it
            with self:
                return func.decompose(*args, **kwargs)

        inputs = list(tensors_in((args, kwargs)))
        before = storage_bytes(inputs)
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))

        self.devices.update(str(tensor.device) for tensor in (*inputs, *outputs))
        name = func._schema.name.removeprefix("aten::")
        if not _makes_view(func, name):
            self.largest = max([self.largest, *(tensor.numel() for tensor in outputs)])
        if counts_as_op(func, name):
            self.see_op(name, list(tensors_in(args)), outputs)
        if name in _FRESH:
            before = {}  # Python made the argument a moment ago, without an operation
        grown = self._live_bytes.see((*inputs, *outputs), before)
        if grown:
            self.see_allocation(name, grown)
        return result

    def see_op(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Count an operation. A subclass may want to know more about it.

        Args:    inputs: the tensors among its arguments, without `out`
        """
        self.ops += 1
        self.by_op[name] += 1
        self.gemms += name.removesuffix("_") in GEMMS
        self.host_reads += name in _HOST_READS or _copies_to_host(name, inputs, outputs)

    def see_allocation(self, name: str, num_bytes: int) -> None:
        """For a subclass: the storages that an operation allocated hold so many bytes."""


GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"})
_HOST_READS = frozenset({"_local_scalar_dense", "equal", "nonzero"})
_COPIES = frozenset({"_to_copy", "copy_", "copy", "_copy_from", "_copy_from_and_resize"})
_FRESH = frozenset({"lift_fresh", "lift_fresh_copy"})  # torch.tensor(...), and x[0] = 1.0
_VIEWS_BY_NAME = frozenset({"_unsafe_view", "_reshape_alias", "lift", *_FRESH})
_NOT_KERNELS = ("prim::", "profiler::")  # record_function's marks, sizes asked for as operations


def counts_as_op(func: Any, name: str) -> bool:
    """Whether a dispatched operation counts: no view, and more than a request for memory.

    Args:    func: the overload that a dispatch mode was given
             name: of its schema, without "aten::"
    """
    if name.startswith(_NOT_KERNELS) or name.lstrip("_").startswith(("empty", "new_empty")):
        return False
    return not _makes_view(func, name)


def _makes_view(func: Any, name: str) -> bool:
    returns_view = any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in func._schema.returns
    )
    return returns_view or name in _VIEWS_BY_NAME or torch.Tag.inplace_view in func.tags


def _copies_to_host(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    if name not in _COPIES or not all(tensor.device.type == "cpu" for tensor in outputs):
        return False
    return any(tensor.device.type not in ("cpu", "meta") for tensor in inputs)


def _is_composite(func: Any) -> bool:
    if func._schema.name.startswith(_NOT_KERNELS):
        return False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from tensors_in(branch)
    elif isinstance(tree, Mapping):
        yield from tensors_in(tuple(tree.values()))
