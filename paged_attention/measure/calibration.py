"""Measure a call: time, ops, GEMMs, host reads, memory; and this machine's own yardsticks.

m = measure(lambda: paged_attention(query, key_cache, ...))
m.seconds, m.spread, m.cold_seconds, m.ops, m.peak_bytes

floor(num_bytes).seconds          what reading that many bytes takes at the least, here
interleaved({"a": f, "b": g})     both in one run, taking turns: use it to compare
profiler_peak_bytes(f)            a second opinion on peak_bytes, from inside the kernels
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paged_attention.cost.profiles import DeviceProfile, Figure, profile_of
from paged_attention.measure.machine import device_name
from paged_attention.measure.timing import Measurement, interleaved
from paged_attention.measure.yardstick import FloorReader

_MALLOC_KEEPS = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: larger ones go back to the system


def calibrate(device="cpu", *, synchronize=None) -> DeviceProfile:
    """Measure this machine's profile: what an operation and a byte cost. About three seconds.

    What is measured looks like decode: the floor's reading; small operations that make their own
    results, with a view now and then; blocks of K and V put heads first, into memory that was
    written before, and into memory that the allocator has just been given; a fill, likewise.

    Returns: DeviceProfile, each figure the quartiles of what was measured; fresh_page_cost and
             fresh_from on a CPU only; wave is what the kernel uses on this device
    Raises:  as `measure`
    Cost:    some 600 MiB of memory
    """
    read = FloorReader(256 * 2**20, device=device)
    scores = torch.ones(8, 64, device=device)
    blocks = torch.ones(1280, 4, 64, 16, 4, device=device)  # 80 MiB: never kept by malloc
    kept = torch.ones(blocks.numel(), device=device)
    heads_first = (
        blocks.permute(1, 0, 3, 2, 4),  # K of the "vllm" layout, then V
        blocks.view(1280, 4, 256, 16).permute(1, 0, 3, 2),
    )

    def four_ops():
        row = scores[3]
        return torch.exp(row - row.amax(dim=-1)).sum(dim=-1)

    def rearrange():
        for lanes in heads_first:
            kept.view(lanes.shape).copy_(lanes)

    def rearrange_afresh():
        for lanes in heads_first:
            lanes.contiguous()

    fns = {"read": read, "ops": four_ops, "rearrange": rearrange}
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        fns["rearrange afresh"] = rearrange_afresh
        fns["fill"] = lambda: kept.fill_(1.0)
        fns["fill afresh"] = lambda: torch.empty_like(kept).fill_(1.0)
    timed = interleaved(fns, device=device, synchronize=synchronize, min_seconds=0.3)

    def rate(name, num_bytes, source):
        fast, slow = timed[name].spread
        return Figure(num_bytes / slow, num_bytes / fast, "B/s", f"measured here: {source}")

    fast, slow = timed["ops"].spread
    wave = profile_of(device).wave_bytes
    return DeviceProfile(
        device_name(device),
        bandwidth=rate("read", read.num_bytes, "mv of 256 MiB"),
        op_cost=Figure(fast / 4, slow / 4, "s", "measured here: amax, sub, exp, sum of a row"),
        rearrange_bandwidth=rate(
            "rearrange", 4 * blocks.nbytes, "80 MiB of blocks put heads first, read and written"
        ),
        fresh_page_cost=_fresh_page_cost(timed, blocks.nbytes) if on_cpu else None,
        fresh_from=_MALLOC_KEEPS if on_cpu else None,
        wave=Figure(wave, wave, "B", "device.profile_of, as the kernel does"),
    )


def _fresh_page_cost(timed: Mapping[str, Measurement], num_bytes: int) -> Figure:
    """From a fill to a copy that rearranges: each into fresh memory, less the same into kept."""
    low, high = sorted(
        max(0.0, timed[f"{name} afresh"].seconds - timed[name].seconds) / (times * num_bytes)
        for name, times in (("fill", 1), ("rearrange", 2))
    )
    source = "measured here: 80 MiB filled, or rearranged, into fresh memory, less into kept"
    return Figure(low, high, "s/B", source)
