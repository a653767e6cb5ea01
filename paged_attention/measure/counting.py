"""Count what a call asks of the device: ops, GEMMs, host reads, and peak bytes.

Counts are exact, the same on every device and on `meta` tensors, which hold no data: so what a
step costs at 100,000 tokens can be counted on a machine that has no memory for 100,000 tokens.

    counts = count(lambda: paged_attention(query, key_cache, ...))
    counts.ops, counts.gemms, counts.host_reads, counts.peak_bytes, counts.largest
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Counts:
    """What one call did, as `OpCounter` defines it.

    ops:        ATen ops dispatched below autograd, less views and empty*/new_empty*
    gemms:      of those, mm, addmm, bmm, baddbmm, mv, addmv and dot
    host_reads: of those, the ones that make the host wait for a value
    peak_bytes: the most bytes that the call's own storages held at once
    largest:    elements of the largest tensor that an op made or wrote; views don't count
    by_op:      how often each op ran, by name without the overload: {"bmm": 2, ...}
    devices:    the devices that the ops' tensors live on, as strings: {"cpu", "cuda:0"}
    """

    ops: int
    gemms: int
    host_reads: int
    peak_bytes: int
    largest: int
    by_op: Mapping[str, int] = field(repr=False)
    devices: frozenset[str] = field(repr=False)


def count(fn: Callable[[], object]) -> Counts:
    """Run `fn()` once and count what it does.

    Args:    fn: takes no arguments; whatever it returns is dropped
    Returns: Counts, for this one call
    Raises:  whatever fn raises
    Cost:    one call of fn, plus some 10 microseconds of Python an op
    """
    with OpCounter() as counter:
        fn()
    return counter.counts()


class OpCounter(TorchDispatchMode):
    """A dispatch mode that counts every op below autograd while it is on.

    An op is counted unless it only makes a view (its schema says its result aliases an argument
    it doesn't write to) or only asks for memory (`empty*`, `new_empty*`). Fills, copies and host
    reads count. Composite ops are counted as the ops they are made of, in inference mode too.

    A host read is `_local_scalar_dense` (`.item()`, `int(t)`, `bool(t)`), `equal`, `nonzero`, or a
    copy from another device to the CPU.

    `peak_bytes` adds up storages: one that an op allocated counts from that op until nothing
    refers to it, so a view keeps it counted after its base is gone, while views, in-place and
    `out=` ops add nothing. What was alive before the mode was entered is not part of it. Bytes
    are those asked for; an allocator rounds them up.

    What it can't see: anything inside a kernel, such as the copy that `bmm` makes of an operand
    it can't read with its strides, or the `nonzero` inside indexing with a bool mask (set
    `measure.profiler_peak_bytes` beside `peak_bytes`); `.tolist()` and `.numpy()` of a CPU
    tensor, which read memory without an op; other threads' work; and code that `torch.compile`
    has turned into kernels of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self.ops = self.gemms = self.host_reads = self.peak_bytes = self.largest = 0
        self.devices: set[str] = set()
        self._live: dict[int, _Live] = {}  # by the storage's address
        self._live_bytes = 0  # of _live, some of which nothing may refer to any more
        self._watched: set[int] = set()  # ids of tensors whose storage is in _live
        self._orphans: set[int] = set()  # addresses of storages whose tensors are all gone

    def counts(self) -> Counts:
        """What has been counted so far."""
        return Counts(
            self.ops,
            self.gemms,
            self.host_reads,
            self.peak_bytes,
            self.largest,
            dict(self.by_op),
            frozenset(self.devices),
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_composite(func):  # reached only in inference mode, where autograd doesn't split it
            with self:
                return func.decompose(*args, **kwargs)

        inputs = list(tensors_in((args, kwargs)))
        before = {_address(t): t.untyped_storage().nbytes() for t in inputs}
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))

        self.devices.update(str(t.device) for t in (*inputs, *outputs))
        name = func._schema.name.removeprefix("aten::")
        if not _makes_view(func, name):
            self.largest = max([self.largest, *(t.numel() for t in outputs)])
        if _counts_as_op(func, name):
            self.ops += 1
            self.by_op[name] += 1
            self.gemms += name.removesuffix("_") in _GEMMS
            self.host_reads += name in _HOST_READS or _copies_to_host(name, inputs, outputs)
        if name in _FRESH:
            before = {}  # its argument was made by Python a moment ago, without an op
        self._track((*inputs, *outputs), before)
        return result

    def _track(self, tensors, before: Mapping[int, int]) -> None:
        """Add the storages that appeared or grew in an op, and raise the peak if they make one."""
        grown = False
        for tensor in tensors:
            storage, address = tensor.untyped_storage(), _address(tensor)
            live = self._live.get(address)
            if live is None:
                # A storage from before the mode counts only for what an op makes it grow by.
                outside = before.get(address, 0)
                if storage.nbytes() == outside:
                    continue
                live = self._live[address] = _Live(StorageWeakRef(storage), outside)
            size = storage.nbytes() - live.size - live.outside
            live.size += size
            self._live_bytes += size
            grown = grown or size > 0
            self._watch(tensor, address, live)
        if grown and self._live_bytes > self.peak_bytes:
            self._forget_dead()
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    # A weak reference to a storage has no callback, one to a tensor has. So a storage is asked
    # whether it's gone once the last tensor seen to refer to it is: never all storages each time.

    def _watch(self, tensor: torch.Tensor, address: int, live: _Live) -> None:
        if id(tensor) not in self._watched:
            self._watched.add(id(tensor))
            live.tensors += 1
            self._orphans.discard(address)
            weakref.finalize(tensor, self._unwatch, id(tensor), address).atexit = False

    def _unwatch(self, tensor_id: int, address: int) -> None:
        self._watched.discard(tensor_id)
        self._live[address].tensors -= 1
        if self._live[address].tensors == 0:
            self._orphans.add(address)

    def _forget_dead(self) -> None:
        for address in list(self._orphans):  # a copy: tensors may go meanwhile
            if not self._live[address].reference.expired():
                continue
            self._orphans.remove(address)
            self._live_bytes -= self._live.pop(address).size


@dataclass
class _Live:
    """A storage that counts, as long as `reference` isn't expired. (The reference also keeps its
    address from being used again.)"""

    reference: StorageWeakRef
    outside: int  # bytes it held before the mode was entered
    size: int = 0  # bytes that count
    tensors: int = 0  # Python tensors seen to refer to it and not yet gone


_GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"})
_HOST_READS = frozenset({"_local_scalar_dense", "equal", "nonzero"})
_COPIES = frozenset({"_to_copy", "copy_", "copy", "_copy_from", "_copy_from_and_resize"})
_FRESH = frozenset({"lift_fresh", "lift_fresh_copy"})  # torch.tensor(...), and x[0] = 1.0
_VIEWS_BY_NAME = frozenset({"_unsafe_view", "_reshape_alias", "lift", *_FRESH})
_NOT_KERNELS = ("prim::", "profiler::")  # record_function's marks, sizes asked for as ops


def _counts_as_op(func, name: str) -> bool:
    if name.startswith(_NOT_KERNELS) or name.lstrip("_").startswith(("empty", "new_empty")):
        return False
    return not _makes_view(func, name)


def _makes_view(func, name: str) -> bool:
    returns_view = any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in func._schema.returns
    )
    return returns_view or name in _VIEWS_BY_NAME or torch.Tag.inplace_view in func.tags


def _copies_to_host(name: str, inputs, outputs) -> bool:
    if name not in _COPIES or not all(t.device.type == "cpu" for t in outputs):
        return False
    return any(t.device.type not in ("cpu", "meta") for t in inputs)


def _is_composite(func) -> bool:
    if func._schema.name.startswith(_NOT_KERNELS):
        return False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def tensors_in(tree) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from tensors_in(branch)
    elif isinstance(tree, Mapping):
        yield from tensors_in(tuple(tree.values()))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
