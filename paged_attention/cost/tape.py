"""A tape of operations: tensors that know only their bytes, and what was done with them.

A tensor here is a number of elements in a storage. A storage is alive as long as Python refers to
a tensor in it, exactly as in PyTorch, so a function that names its variables as a stage does has
the stage's peak without a word about lifetimes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Step:
    """What the operations of one purpose cost together, over all sequences.

    label:            "gather", "reorder", "convert", "repeat", "pad", "GEMMs", "softmax", ...
    ops:              operations, as `counting.OpCounter` counts them
    gemms:            of those, matrix products
    host_reads:       of those, reads that make the host wait for a value
    bytes_read:       each operation reads its inputs once, a broadcast one at its real size
    bytes_written:    each operation writes its outputs once
    rearranged_bytes: of those read and written: by copies that permute or repeat; a block that is
                      copied as a whole goes as fast as any other bytes
    fresh_bytes:      of those written: for the first time, into a temporary of `fresh_from`
                      bytes or more, whose pages the system has to hand out anew
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


class Tensor:
    """`numel` elements of `itemsize` bytes; an input of the call, unless a tape made it."""

    def __init__(self, numel: int, itemsize: int, storage: _Storage | None = None) -> None:
        self.numel, self.itemsize, self._storage = numel, itemsize, storage

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def view(self, numel: int) -> Tensor:
        """As many of its elements, in the same storage."""
        return Tensor(numel, self.itemsize, self._storage)

    def part(self, numel: int, itemsize: int) -> Tensor:
        """So many elements of another size, in the same storage."""
        return Tensor(numel, itemsize, self._storage)


class Tape:
    """Adds up what operations cost, by step, and follows the bytes that are alive.

    alive, peak: bytes of the storages made here that something refers to; the most so far
    """

    def __init__(self, fresh_from: int | None = None) -> None:
        self._fresh_from = float("inf") if fresh_from is None else fresh_from
        self._steps: dict[str, Step] = {}
        self.alive = self.peak = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order in which they first occur."""
        return tuple(self._steps.values())

    def empty(self, label: str, numel: int, itemsize: int = 4) -> Tensor:
        """Memory, without an operation."""
        tensor = Tensor(numel, itemsize, _Storage(self, numel * itemsize))
        if tensor.nbytes >= self._fresh_from:
            self._step(label).fresh_bytes += tensor.nbytes
        return tensor

    def kept(self, numel: int, itemsize: int = 4) -> Tensor:
        """Memory that stays with the caller from call to call: it counts, but is never fresh."""
        return Tensor(numel, itemsize, _Storage(self, numel * itemsize))

    def op(
        self, label: str, *reads: Tensor, new: int = 0, itemsize: int = 4, into=None, times=1
    ) -> Tensor:
        """An operation that reads tensors and makes one of `new` elements, float32 by default.

        into:  the tensor it writes instead of making one
        times: how often it runs; only with `into`
        """
        result = self.empty(label, new, itemsize) if into is None else into
        step = self._step(label)
        step.ops += times
        step.bytes_read += times * sum(tensor.nbytes for tensor in reads)
        step.bytes_written += times * result.nbytes
        return result

    def rearrange(self, label: str, *reads: Tensor, times: int = 1, **result) -> Tensor:
        """An operation that copies what it reads in another order: permute, repeat."""
        step = self._step(label)
        before = step.bytes_moved
        tensor = self.op(label, *reads, times=times, **result)
        step.rearranged_bytes += step.bytes_moved - before
        return tensor

    def gemm(self, label: str, *reads: Tensor, **result) -> Tensor:
        """A matrix product."""
        self._step(label).gemms += 1
        return self.op(label, *reads, **result)

    def host_read(self, label: str, *, num_bytes: int = 4, times: int = 1) -> None:
        """The host reads a number, such as an int32 length or block id."""
        self._step(label).host_reads += times
        self.op(label, Tensor(num_bytes, 1), into=Tensor(0, 1), times=times)

    def _step(self, label: str) -> Step:
        return self._steps.setdefault(label, Step(label))


class _Storage:
    def __init__(self, tape: Tape, nbytes: int) -> None:
        self._tape, self._nbytes = tape, nbytes
        tape.alive += nbytes
        tape.peak = max(tape.peak, tape.alive)

    def __del__(self) -> None:
        self._tape.alive -= self._nbytes
