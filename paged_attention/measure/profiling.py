"""A second look at a call, from inside its operations: where its time goes, what it allocates.

`torch.profiler` and the allocators also see what an operation does inside, which the counts of
`counting` can't show.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.profiler import profile

from paged_attention.measure.counting import GEMMS
from paged_attention.measure.synchronization import Device, Fn

KINDS = ("gather", "copies", "fills", "GEMMs", "softmax, merge", "other")
_OPS = {  # of each kind, without the underscore at the end of those that write in place
    "gather": ("index", "index_select", "take"),
    "copies": ("copy", "_to_copy", "clone", "repeat_interleave", "index_copy"),
    "fills": ("fill", "zero", "zeros_like", "new_zeros", "new_ones", "new_full", "ones"),
    "GEMMs": tuple(GEMMS),
    "softmax, merge": ("amax", "sub", "exp", "sum", "div", "mul", "_softmax", "cat", "log", "add"),
}
_KIND_OF = {op: kind for kind, ops in _OPS.items() for op in ops}


def kind_of(op: str) -> str:
    """Which of KINDS an ATen operation is.

    Args:    op: its name without the overload, "aten::bmm" or "bmm"

    Example:
        >>> kind_of("aten::index_select"), kind_of("bmm"), kind_of("exp_"), kind_of("tan")
        ('gather', 'GEMMs', 'softmax, merge', 'other')
    """
    return _KIND_OF.get(op.removeprefix("aten::").removesuffix("_"), "other")


def breakdown(fn: Fn, *, runs: int = 5) -> dict[str, float]:
    """Seconds that one call spends inside PyTorch's operations, by kind.

    An operation's time leaves out the operations that it calls. On a CUDA device it is the time
    of its kernels. Views are under "other". Python between operations is left out.

    Args:    fn: takes no arguments; called once to warm up and `runs` times under the profiler
    Returns: {kind: seconds} for each of KINDS, from the run whose total is the median
    Raises:  ValueError: runs < 1
    """
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1")
    fn()
    by_run = [_seconds_by_kind(fn) for _ in range(runs)]
    totals = [sum(run.values()) for run in by_run]
    return by_run[totals.index(statistics.median_low(totals))]


def _seconds_by_kind(fn: Fn) -> dict[str, float]:
    with profile() as profiler:
        fn()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    ops: list[Any] = [e for e in profiler.key_averages() if e.key.startswith("aten::")]
    on_device = any(map(_device_microseconds, ops))
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for op in ops:
        microseconds = _device_microseconds(op) if on_device else op.self_cpu_time_total
        seconds[kind_of(op.key)] += microseconds * 1e-6
    return seconds


def _device_microseconds(op: Any) -> float:
    if hasattr(op, "self_device_time_total"):
        return op.self_device_time_total
    return op.self_cuda_time_total  # its name before torch 2.4


def profiler_peak_bytes(fn: Fn) -> int:
    """The peak of one call by `torch.profiler`, above what was alive at the start.

    The allocators report to the profiler. So it also sees what a kernel allocates inside itself,
    which `peak_bytes` can't see, and the scalars of a few bytes that operations make on the way.

    Returns: bytes, of all devices together
    """
    with profile(profile_memory=True) as profiler:
        fn()
    kineto: Any = profiler.profiler
    events = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns() if hasattr(e, "start_ns") else e.start_us())
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def allocator_peak_bytes(fn: Fn, *, device: Device = "cuda") -> int:
    """The peak of one call by the CUDA allocator's own statistics, above the start.

    Returns: bytes, each allocation rounded up as the allocator does it (usually to 512 bytes)
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
