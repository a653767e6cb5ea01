"""What a call costs, told from the call itself: it runs once, and each operation is priced.

On `meta` tensors nothing is computed, so the cost of a step at 100,000 tokens is known in
milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from torch import Tensor

from paged_attention.measure.counting import OpCounter
from paged_attention.measure.profiling import kind_of


@dataclass
class Step:
    """What the operations of one kind cost together.

    label:            the kind, as `measure.breakdown` names it: "gather", "copies", "GEMMs", ...
    ops:              operations, as `measure.count` counts them
    gemms:            matrix products among them
    host_reads:       reads among them that make the host wait for a value
    bytes_read:       each operation reads its inputs once, a broadcast one at its real size
    bytes_written:    each operation writes its outputs once
    rearranged_bytes: the part of bytes_read and bytes_written that belongs to copies which permute
                      or repeat. A copy that keeps the order goes as fast as any other operation
    fresh_bytes:      the part of bytes_written that goes to temporaries of `fresh_from` bytes or
                      more, whose pages the system has to hand out anew
    """

    label: str
    ops: int = 0
    gemms: int = 0
    host_reads: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    rearranged_bytes: int = 0
    fresh_bytes: int = 0

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


class Allocation(NamedTuple):
    """Memory that a call asked for."""

    label: str  # of the step that asked
    num_bytes: int
    alive: int  # bytes that the call then held, these included


@dataclass
class Trace:
    """What a call did: its steps by label, without their fresh bytes, and its allocations.

    Both are in the order in which they first occur.
    """

    steps: dict[str, Step] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)


def extrapolated(shorter: Trace, longer: Trace, times: int) -> Trace:
    """The trace of a call whose loops run `times` times more often than those of `shorter`.

    Every number grows by the same amount with each trip through a loop, because all trips cost the
    same. So does the memory held at corresponding moments. Moments before the middle of a loop
    correspond if they are equally far from the beginning of the call, and later ones if they are
    equally far from its end.

    Args:    longer: the trace of a call whose loops run once more than those of `shorter`
    """

    def grown(a: int, b: int) -> int:
        return a + times * (b - a)

    steps = {}
    for label, step in shorter.steps.items():
        numbers = zip(astuple(step)[1:], astuple(longer.steps[label])[1:])
        steps[label] = Step(label, *(grown(a, b) for a, b in numbers))
    middle = len(shorter.allocations) // 2
    trip_end = middle + len(longer.allocations) - len(shorter.allocations)
    trip = longer.allocations[middle:trip_end]
    others = longer.allocations[:middle] + longer.allocations[trip_end:]
    allocations = [
        Allocation(a.label, grown(a.num_bytes, b.num_bytes), grown(a.alive, b.alive))
        for a, b in zip(shorter.allocations, others)
    ]
    return Trace(steps, allocations + trip * times)


class Tracer(OpCounter):
    """An OpCounter that also leaves a `trace`."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self._kept_bytes = 0

    def keep(self, num_bytes: int) -> None:
        """Count memory that outlives the call, as a workspace does. It is never fresh."""
        self._kept_bytes = num_bytes
        self.see_allocation("empty", 0)

    def see_op(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        gemms, host_reads = self.gemms, self.host_reads
        super().see_op(name, inputs, outputs)
        read, written = bytes_read(name, inputs, outputs), bytes_written(name, inputs, outputs)
        step = self._step(name)
        step.ops += 1
        step.gemms += self.gemms - gemms
        step.host_reads += self.host_reads - host_reads
        step.bytes_read += read
        step.bytes_written += written
        step.rearranged_bytes += _rearranges(name, inputs) * (read + written)

    def see_allocation(self, name: str, num_bytes: int) -> None:
        alive = self._kept_bytes + self._live_bytes.alive
        self.trace.allocations.append(Allocation(self._step(name).label, num_bytes, alive))

    def _step(self, name: str) -> Step:
        label = kind_of(name)
        return self.trace.steps.setdefault(label, Step(label))


_ONLY_WRITE = {"zeros_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_"}
_PICK = {"index", "index_select", "take"}


def bytes_read(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an operation reads. From a gather's source it reads what it picks."""
    if name in _ONLY_WRITE:
        return 0
    if name in ("copy_", "index_copy_"):
        return _real_bytes(inputs[1:])
    return _real_bytes(outputs + inputs[1:] if name in _PICK else inputs)


def bytes_written(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an operation writes. In a scatter's target it writes what it replaces."""
    if name == "index_copy_":
        return _real_bytes(inputs[2:])
    return 0 if name == "nonzero" else _real_bytes(outputs)  # what nonzero finds is the host's


def _real_bytes(tensors: list[Tensor]) -> int:
    """Bytes in memory, where a dimension that is broadcast, of stride 0, is there once."""
    sizes = (
        [1 if step == 0 else n for n, step in zip(x.shape, x.stride())] + [x.element_size()]
        for x in tensors
    )
    return sum(map(math.prod, sizes))


def _rearranges(name: str, inputs: list[Tensor]) -> bool:
    """Whether an operation is a copy that permutes or repeats. A gather picks rows in any order,
    so only the order inside of a row matters."""
    if name == "index_select":
        return not _in_order(inputs[0][:1])
    return name in ("copy_", "clone") and not all(map(_in_order, inputs))


def _in_order(x: Tensor) -> bool:
    """Whether a tensor's elements lie in memory in the order of its dimensions, each once."""
    steps = [step for n, step in zip(x.shape, x.stride()) if n > 1]
    return 0 not in steps and steps == sorted(steps, reverse=True)
