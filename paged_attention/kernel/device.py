"""How much of K and V a device gathers at once."""

import functools

import torch

CPU_WAVE = 8 * 2**20  # bytes. Half of it took 1.1 times as long on a 2-core Xeon with 2 MiB of L2
LAUNCH = 6e-6  # seconds that an accelerator's operation costs at the most, whatever its size
UNKNOWN_BANDWIDTH = 1e12  # bytes per second, assumed where a device doesn't tell
OPS_PER_WAVE = 15  # operations of Phase 1, which a test counts
AMORTISED = 10  # the time that a wave's bytes take, in times of its launches


def accelerator_wave(bandwidth: float, launch: float) -> int:
    """The most bytes of a wave's K as float32, on a device where launches cost.

    Reading K and V of a wave takes ten times as long as launching its operations, so that the
    launches add a tenth.

    Args:    bandwidth: bytes per second;  launch: seconds that an operation costs
    """
    return int(AMORTISED * OPS_PER_WAVE * launch * bandwidth / 2)


@functools.cache
def wave_bytes(device: torch.device) -> int:
    """The most bytes that a wave's K may take as float32. Its V may take as many.

    On a CPU a wave stays in the processor's caches. `meta` has a CPU's waves, because a CPU's
    operations are counted there.
    """
    if device.type in ("cpu", "meta"):
        return CPU_WAVE
    return accelerator_wave(peak_bandwidth(device), LAUNCH)


def peak_bandwidth(device: torch.device) -> float:
    """Bytes per second, from CUDA's properties of the device where they tell."""
    if device.type != "cuda":
        return UNKNOWN_BANDWIDTH
    properties = torch.cuda.get_device_properties(device)
    clock = getattr(properties, "memory_clock_rate", 0)  # kHz, not in every version of torch
    width = getattr(properties, "memory_bus_width", 0)  # bits
    return 2 * clock * 1e3 * width / 8 or UNKNOWN_BANDWIDTH  # two transfers a clock
