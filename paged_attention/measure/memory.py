"""Second opinions on peak memory: what the allocators themselves say of a call.

`counting.OpCounter` sees what operations ask for; these also see what a kernel allocates inside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def profiler_peak_bytes(fn: Callable[[], object]) -> int:
    """The peak of one call of `fn` as `torch.profiler` saw it, above what was alive at the start.

    The allocators report to it, so it also sees what a kernel allocates inside itself, which
    `peak_bytes` can't; and scalars of a few bytes that ops wrap in tensors on the way.

    Returns: bytes, all devices together
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        result = fn()
        del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns() if hasattr(e, "start_ns") else e.start_us())
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def allocator_peak_bytes(fn: Callable[[], object], *, device="cuda") -> int:
    """The peak of one call of `fn` by the CUDA allocator's own statistics, above the start.

    Returns: bytes, each allocation rounded up as the allocator does (512 bytes, usually)
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before
