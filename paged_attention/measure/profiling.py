"""Where a call's time goes, by kind of operation, as `torch.profiler` sees it.

breakdown(lambda: single_bmm(*inputs, scale))     {"gather": 0.011, "copies": 0.13, ...}
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
_REDUCING = ("amax", "sub", "exp", "sum", "div", "mul", "_softmax", "cat", "log", "add", "mul_")
_KIND_OF = {
    **dict.fromkeys(("index", "index_select"), "gather"),
    **dict.fromkeys(("copy_", "clone", "repeat_interleave"), "copies"),
    **dict.fromkeys(("fill_", "zero_"), "fills"),
    **dict.fromkeys(_GEMMS, "GEMMs"),
    **dict.fromkeys(_REDUCING, "softmax, merge"),
}
KINDS = ("gather", "copies", "fills", "GEMMs", "softmax, merge", "other")


def breakdown(fn: Callable[[], object], *, runs: int = 5) -> dict[str, float]:
    """Seconds that one call of `fn` spends inside PyTorch's operations, by kind.

    An operation's time is its own, without the operations it calls. On a CUDA device it is the
    time of its kernels. Python between operations isn't in it; views are, under "other".

    Args:    fn: takes no arguments; called once to warm up and `runs` times under the profiler
    Returns: {kind: seconds} for each of KINDS, from the run whose total is the median
    """
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1")
    fn()
    by_run = [_one_run(fn) for _ in range(runs)]
    totals = [sum(run.values()) for run in by_run]
    return by_run[totals.index(statistics.median_low(totals))]


def _one_run(fn) -> dict[str, float]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        fn()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    ops = [e for e in profiler.key_averages() if e.key.startswith("aten::")]
    device = [getattr(e, "self_device_time_total", None) for e in ops]
    if None in device:  # its name before torch 2.4
        device = [e.self_cuda_time_total for e in ops]
    on_device = any(device)
    seconds = dict.fromkeys(KINDS, 0.0)
    for op, microseconds in zip(ops, device):
        kind = _KIND_OF.get(op.key.removeprefix("aten::"), "other")
        seconds[kind] += (microseconds if on_device else op.self_cpu_time_total) * 1e-6
    return seconds
