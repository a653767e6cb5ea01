"""What a stage or the kernel costs, worked out beforehand: ops, GEMMs, bytes, memory, seconds.

    cost = predict("single_bmm", Shape([100_000]), profile)
    cost.ops, cost.gemms, cost.bytes_read, cost.bytes_written, cost.temporary_bytes
    cost.seconds.low, cost.seconds.high
    for step in cost.steps: print(step.label, step.ops, step.bytes_read, step.bytes_written)

Nothing is run and nothing is measured here: `stage_costs.py` goes through each stage's operations
in integers, `kernel_cost.py` through the kernel's, and a `DeviceProfile` says what an operation
and a byte cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paged_attention.cost.kernel import paged_attention
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure
from paged_attention.cost.stages import STAGE_COSTS
from paged_attention.cost.tape import Step, Tape
from paged_attention.kernel.layouts import LAYOUTS, lanes_per_piece

__all__ = ["NAMES", "Cost", "Shape", "Step", "predict", "seconds_of"]

NAMES = (*STAGE_COSTS, "paged_attention")  # of what can be predicted


@dataclass(frozen=True)
class Shape:
    """One decode step; the defaults are the series' workload.

    seq_lens:       tokens of each sequence, 0 allowed; any iterable of int, kept as a tuple
    num_heads, num_kv_heads, head_size, block_size: as in the cache's layout
    partition_size: tokens, rounded up to whole blocks; None: what is called has its own default,
                    512 tokens in a stage, 1,024 or what a wave holds in the kernel
    dtype:          of the query and of both caches: float32, float16 or bfloat16
    layout:         of the caches, "vllm", "HND" or "NHD"; the stages take "vllm" only

    Raises: ValueError: naming the argument, its value and what it should be
    """

    seq_lens: tuple[int, ...]
    num_heads: int = 24
    num_kv_heads: int = 4
    head_size: int = 256
    block_size: int = 16
    partition_size: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "vllm"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "seq_lens", tuple(self.seq_lens))
        except TypeError:
            raise ValueError(f"seq_lens={self.seq_lens!r} must be a list of lengths") from None
        for length in self.seq_lens:
            if not _is_int(length) or length < 0:
                raise ValueError(f"seq_lens holds {length!r}: each must be an int, at least 0")
        for name in ("num_heads", "num_kv_heads", "head_size", "block_size", "partition_size"):
            value = getattr(self, name)
            if name == "partition_size" and value is None:
                continue
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int, at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={self.dtype!r} must be torch.float32, float16 or bfloat16")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be one of {', '.join(LAYOUTS)}")
        if self.layout == "vllm" and self.head_size % lanes_per_piece(self.dtype):
            raise ValueError(
                f"head_size={self.head_size} must be a multiple of "
                f"{lanes_per_piece(self.dtype)} for {self.dtype} (16 bytes)"
            )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together that the sequences' tokens hold: what the floor reads."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class Cost:
    """What one call costs: the sums over its steps, and the most bytes alive at once.

    ops, gemms, host_reads: operations, matrix products among them, and reads that make the host
                     wait for a value; what `measure` counts
    bytes_read, bytes_written: each operation reads its inputs once, a broadcast one at its real
                     size, and writes its outputs once; caches between them are not thought of
    temporary_bytes: the peak of what the call allocates, its result included; what `measure`
                     counts as peak_bytes
    seconds:         a band; None without a profile
    steps:           in the order in which they first occur; `seconds_of(step, profile)` is a
                     step's share of the time
    """

    ops: int
    gemms: int
    host_reads: int
    bytes_read: int
    bytes_written: int
    temporary_bytes: int
    seconds: Figure | None
    steps: tuple[Step, ...] = field(repr=False)

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


def predict(name: str, shape: Shape, profile: DeviceProfile | None = None) -> Cost:
    """What the named stage costs at this shape, or the kernel, given int32 block tables and
    contiguous caches.

    Of the kernel it is a call of `paged_attention` as it is meant to be used: no options, lengths
    on the CPU. Its workspace counts among the temporary bytes, as in a first call.

    Args:    name: of a stage, such as "single_bmm", or "paged_attention"
             shape: Shape
             profile: from `measure.calibrate`, or one of `device.PROFILES`; None: no seconds, and
                   the kernel's waves are those of a CPU
    Returns: Cost; counts and bytes are exact, seconds a band as wide as the profile's figures
    Raises:  ValueError: an unknown name, a stage in another layout than "vllm", or a profile
             without bandwidth or op_cost
    Cost:    some 20 microseconds a partition, on the host
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r} must be one of {', '.join(NAMES)}")
    tape = Tape(fresh_from=None if profile is None else profile.fresh_from)
    if name in STAGE_COSTS:
        if shape.layout != "vllm":
            raise ValueError(f'layout={shape.layout!r} must be "vllm" for the stage {name}')
        STAGE_COSTS[name](tape, shape)
    else:
        paged_attention(tape, shape, (profile or PROFILES["cpu"]).wave_bytes)
    seconds = None
    if profile is not None:
        bands = [seconds_of(step, profile) for step in tape.steps]
        seconds = _band(sum(b.low for b in bands), sum(b.high for b in bands), profile)
    return Cost(
        ops=sum(step.ops for step in tape.steps),
        gemms=sum(step.gemms for step in tape.steps),
        host_reads=sum(step.host_reads for step in tape.steps),
        bytes_read=sum(step.bytes_read for step in tape.steps),
        bytes_written=sum(step.bytes_written for step in tape.steps),
        temporary_bytes=tape.peak,
        seconds=seconds,
        steps=tape.steps,
    )


def seconds_of(step: Step, profile: DeviceProfile) -> Figure:
    """How long a step takes: ops x op_cost + bytes / bandwidth, each as the profile has it.

    Where the profile knows them, bytes that a copy rearranges go at `rearrange_bandwidth`, and
    fresh bytes cost `fresh_page_cost` on top, at both ends of the band: without it the low one
    would be 0.4 times what gqa_broadcast takes at 32,768 tokens, with it 0.9 times.

    What stays out: Python between operations beyond op_cost, the waiting of host reads on a GPU,
    arithmetic, temporaries below `fresh_from` that malloc gives back all the same (what it keeps
    depends on its past), and caches: the kernel's waves stay in them, so it is predicted up to
    1.7 times too slow in the plain layouts. Nor is it foreseen what a virtual machine's host does
    with freed memory: where it takes it back within seconds, the next first write to it costs
    several times as much (3 GB a call, in single_bmm at 32,768 tokens: 0.9 s when called again at
    once, 3.1 s when other stages took their turns in between).

    Args:    step: one of `predict(name, shape, profile).steps`, of the same profile
    Returns: seconds, as a band: the profile's best figures together, and its worst
    Raises:  ValueError: the profile has no bandwidth or no op_cost
    """
    for needed in ("bandwidth", "op_cost"):
        if getattr(profile, needed) is None:
            raise ValueError(
                f"profile {profile.name!r} has no {needed}: measure.calibrate measures it"
            )
    rearrange = profile.rearrange_bandwidth or profile.bandwidth
    streamed = step.bytes_moved - step.rearranged_bytes
    low = (
        step.ops * profile.op_cost.low
        + streamed / profile.bandwidth.high
        + step.rearranged_bytes / rearrange.high
    )
    high = (
        step.ops * profile.op_cost.high
        + streamed / profile.bandwidth.low
        + step.rearranged_bytes / rearrange.low
    )
    if profile.fresh_page_cost is not None:
        low += step.fresh_bytes * profile.fresh_page_cost.low
        high += step.fresh_bytes * profile.fresh_page_cost.high
    return _band(low, high, profile)


def _band(low: float, high: float, profile: DeviceProfile) -> Figure:
    return Figure(low, high, "s", f"predicted from the profile of {profile.name}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
