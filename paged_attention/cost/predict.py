"""What a stage or the kernel costs: operations, GEMMs, bytes, memory, seconds.

    cost = predict("single_bmm", Shape([100_000]), profile)
    cost.ops, cost.gemms, cost.bytes_read, cost.bytes_written, cost.temporary_bytes
    cost.seconds.low, cost.seconds.high
    for step in cost.steps: print(step.label, step.ops, step.bytes_moved)

Nothing is computed and nothing is measured. The call runs once on tensors without data, which
tells its operations and their bytes, and a `DeviceProfile` says what an operation and a byte cost.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from paged_attention.cost.seconds import seconds_of
from paged_attention.cost.shape import Shape
from paged_attention.cost.trace import Step, Trace, Tracer, extrapolated
from paged_attention.kernel.call import Inputs, check_call, check_values
from paged_attention.kernel.checks import refuse
from paged_attention.kernel.options import Options
from paged_attention.kernel.partition import whole_blocks
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.workspace import Workspace
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure
from paged_attention.stages import STAGES

KERNEL = "paged_attention"
NAMES = (*STAGES, KERNEL)  # that can be predicted
TRACED_PARTITIONS = 4  # full ones, of a longer sequence. The others are extrapolated


@dataclass(frozen=True)
class Cost:
    """What one call costs: the sums over its steps, and the most bytes that it holds at once.

    ops, gemms, host_reads: operations, matrix products among them, and reads that make the host
                     wait for a value, as `measure.count` counts them
    bytes_read, bytes_written: each operation reads its inputs once, a broadcast one at its real
                     size, and writes its outputs once. Caches between them are left out
    temporary_bytes: the most that the call holds at once of what it allocates, its result
                     included, which `measure.count` counts as peak_bytes
    seconds:         a band; None without a profile
    steps:           one for each kind of operation, in the order in which they first occur.
                     `seconds_of([step], profile)` is what a step takes alone
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
    """What a stage costs at this shape, or the kernel, with int32 tables and contiguous caches.

    The kernel is called as it is meant to be used, without options and with its lengths on the
    CPU. Its workspace counts among the temporary bytes, as in a first call. Its operations are
    those of a call on a CPU. An accelerator also copies lengths, tables and plan between device
    and host.

    Args:    name: a stage's, such as "single_bmm", or "paged_attention"
             profile: from `measure.calibrate`, or one of `PROFILES`. None: no seconds, and the
                   kernel's waves are those of a CPU
    Returns: Cost. Counts and bytes are exact, and seconds are a band as wide as the profile's
             figures
    Raises:  ValueError: an unknown name, a stage in another layout than "vllm", or a profile
             without bandwidth or op_cost
    Cost:    one call on tensors without data, some 20 microseconds an operation, and nothing when
             asked for the same shape again. A stage's loop over the partitions of one sequence is
             cut short, but in a batch all loops run

    Example:
        >>> cost = predict("single_bmm", Shape([100_000]), PROFILES["H200"])
        >>> cost.ops, cost.gemms, cost.bytes_moved, cost.temporary_bytes
        (29, 3, 21451921692, 7415305808)
        >>> round(cost.seconds.low, 4), round(cost.seconds.high, 4)
        (0.0051, 0.0101)
    """
    if name not in NAMES:
        refuse("name", f"one of {', '.join(NAMES)}", repr(name))
    if name == KERNEL:
        return _cost(_kernel_trace(shape, (profile or PROFILES["cpu"]).wave_bytes), profile)
    if shape.layout != "vllm":
        refuse("layout", '"vllm" for a stage', repr(shape.layout))
    return _cost(_stage_trace(name, shape), profile)


def cost_of(call: Callable[[], object], profile: DeviceProfile | None = None) -> Cost:
    """What any call costs. It is run once, and on `meta` tensors that computes nothing.

    Args:    call: takes no arguments; what it returns is dropped
             profile: as for `predict`
    Returns: Cost, as for `predict`
    Raises:  whatever call raises. ValueError: a profile without bandwidth or op_cost
    Cost:    one call, and some 20 microseconds an operation

    Example:
        >>> x = torch.empty(1000, 1000, device="meta")
        >>> cost_of(lambda: torch.softmax(x @ x, dim=-1))
        Cost(ops=2, gemms=1, host_reads=0, bytes_read=12000000, bytes_written=8000000, ...
    """
    with Tracer() as tracer:
        call()
    return _cost(tracer.trace, profile)


def _cost(trace: Trace, profile: DeviceProfile | None) -> Cost:
    fresh = dict.fromkeys(trace.steps, 0)
    if profile is not None and profile.fresh_from is not None:
        for label, num_bytes, _ in trace.allocations:
            fresh[label] += num_bytes if num_bytes >= profile.fresh_from else 0
    steps = [replace(step, fresh_bytes=fresh[label]) for label, step in trace.steps.items()]
    seconds = None
    if profile is not None:
        seconds = seconds_of(steps, profile)
    summed = ("ops", "gemms", "host_reads", "bytes_read", "bytes_written")
    totals = {name: sum(getattr(step, name) for step in steps) for name in summed}
    peak = max((allocation.alive for allocation in trace.allocations), default=0)
    return Cost(**totals, temporary_bytes=peak, seconds=seconds, steps=tuple(steps))


@functools.lru_cache(maxsize=256)
def _stage_trace(name: str, shape: Shape) -> Trace:
    """A stage's trace. The loops over the partitions of a long sequence are cut short."""
    default = inspect.signature(STAGES[name]).parameters["partition_size"].default
    partition_size = whole_blocks(shape.partition_size or default, shape.block_size)
    skipped = sum(shape.seq_lens) // partition_size - TRACED_PARTITIONS
    if len(shape.seq_lens) != 1 or skipped < 2:
        return _whole_trace(name, shape)
    short = sum(shape.seq_lens) - skipped * partition_size
    shorter, longer = (
        _whole_trace(name, replace(shape, seq_lens=[tokens]))
        for tokens in (short, short + partition_size)
    )
    return extrapolated(shorter, longer, skipped)


def _whole_trace(stage: str, shape: Shape) -> Trace:
    inputs = shape.inputs()
    given = {} if shape.partition_size is None else {"partition_size": shape.partition_size}
    with Tracer() as tracer:
        STAGES[stage](*inputs, 1.0, **given)
    return tracer.trace


@functools.lru_cache(maxsize=256)
def _kernel_trace(shape: Shape, wave_bytes: int) -> Trace:
    """The kernel's trace, with the waves of any device.

    It does what `paged_attention` does, but it checks block ids and plans on the CPU, because both
    need data.
    """
    inputs, lengths = Inputs(*shape.inputs()), list(shape.seq_lens)
    on_meta = inputs._replace(block_tables=inputs.block_tables.to("meta"))
    call = check_call(on_meta, shape.layout, "auto", Options())

    def plan(device: str) -> DecodePlan:
        where = call.shape, shape.layout, torch.device(device)
        sizes = {"partition_size": shape.partition_size, "wave_budget": wave_bytes}
        return DecodePlan.exact(*where, lengths, **sizes)

    with Tracer() as tracer:
        check_values(call._replace(inputs=inputs), lengths)
        planned = plan("cpu")  # held until the run is over, as in a call on a CPU
    plan_on_meta, workspace = plan("meta"), Workspace()
    workspace.bind(plan_on_meta.buffers, on_meta.query)
    tracer.keep(planned.workspace_bytes)
    with tracer:
        plan_on_meta.run_checked(call, None, workspace, return_lse=False)
    return tracer.trace
