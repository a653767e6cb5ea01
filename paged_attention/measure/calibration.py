"""This machine's own profile: what an operation and a byte cost here."""

from __future__ import annotations

import torch

from paged_attention.measure.machine import device_name
from paged_attention.measure.profiles import DeviceProfile, Figure, profile_of
from paged_attention.measure.synchronization import Device, Fn
from paged_attention.measure.timing import Measurement, interleaved
from paged_attention.measure.yardstick import FloorReader

_MALLOC_KEEPS = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: it gives larger ones back


def calibrate(device: Device = "cpu", *, synchronize: Fn | None = None) -> DeviceProfile:
    """Measure this machine's profile in about three seconds.

    What is measured looks like decode: the floor's reading, small operations that make their own
    results, and blocks of K and V put heads first. On a CPU the last is measured twice, into
    memory that was written before and into memory that the allocator has just been given, and so
    is a fill. The difference is what a fresh page costs.

    Args:    device, synchronize: as for `measure`
    Returns: DeviceProfile. Each figure is the band between the quartiles of what was measured.
             fresh_page_cost and fresh_from are of a CPU only. wave is what the kernel uses here
    Raises:  as `measure`
    Cost:    some 600 MiB of memory
    """
    read = FloorReader(256 * 2**20, device=device)
    scores = torch.ones(8, 64, device=device)
    blocks = torch.ones(1280, 4, 64, 16, 4, device=device)  # 80 MiB: more than malloc keeps
    kept = torch.ones(blocks.numel(), device=device)
    heads_first = (
        blocks.permute(1, 0, 3, 2, 4),  # K of the "vllm" layout, then V
        blocks.view(1280, 4, 256, 16).permute(1, 0, 3, 2),
    )

    def four_ops() -> torch.Tensor:
        row = scores[3]
        return torch.exp(row - row.amax(dim=-1)).sum(dim=-1)

    def rearrange() -> None:
        for lanes in heads_first:
            kept.view(lanes.shape).copy_(lanes)

    def rearrange_afresh() -> None:
        for lanes in heads_first:
            lanes.contiguous()

    fns: dict[str, Fn] = {"read": read, "ops": four_ops, "rearrange": rearrange}
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        fns["rearrange afresh"] = rearrange_afresh
        fns["fill"] = lambda: kept.fill_(1.0)
        fns["fill afresh"] = lambda: torch.empty_like(kept).fill_(1.0)
    timed = interleaved(fns, device=device, synchronize=synchronize, min_seconds=0.3)

    fast, slow = timed["ops"].spread
    op_source = "measured here: amax, sub, exp, sum of a row"
    copied = "80 MiB of blocks put heads first, read and written"
    wave = profile_of(device).wave_bytes
    return DeviceProfile(
        device_name(device),
        bandwidth=_rate(timed["read"], read.num_bytes, "mv of 256 MiB"),
        op_cost=Figure(fast / 4, slow / 4, "s", op_source),
        rearrange_bandwidth=_rate(timed["rearrange"], 4 * blocks.nbytes, copied),
        fresh_page_cost=_fresh_page_cost(timed, blocks.nbytes) if on_cpu else None,
        fresh_from=_MALLOC_KEEPS if on_cpu else None,
        wave=Figure(wave, wave, "B", "device.profile_of, as the kernel does"),
    )


def _rate(measurement: Measurement, num_bytes: int, source: str) -> Figure:
    fast, slow = measurement.spread
    return Figure(num_bytes / slow, num_bytes / fast, "B/s", f"measured here: {source}")


def _fresh_page_cost(timed: dict[str, Measurement], num_bytes: int) -> Figure:
    """Seconds a byte that fresh memory takes longer than kept memory, in a fill and in a copy."""
    low, high = sorted(
        max(0.0, timed[f"{name} afresh"].seconds - timed[name].seconds) / (times * num_bytes)
        for name, times in (("fill", 1), ("rearrange", 2))
    )
    source = "measured here: 80 MiB filled, or rearranged, into fresh memory, less into kept"
    return Figure(low, high, "s/B", source)
