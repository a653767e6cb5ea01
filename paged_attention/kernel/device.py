"""How much of K and V a device gathers at once."""

import functools

import torch

CPU_WAVE = 8 * 2**20  # bytes. Half of it took 1.1 times as long on a 2-core Xeon with 2 MiB of L2
MOST_MEMORY = 256_000_000  # bytes that a wave may take on an accelerator,
SHARE_OF_MEMORY = 50  # and no more than a fiftieth of its memory


def accelerator_wave(memory: int) -> int:
    """The most bytes of a wave's K as float32, on an accelerator with so many bytes of memory.

    A wave costs launches, so larger waves are faster, and only memory limits them. K as float32
    gets half of what a wave may take. V comes to the same place afterwards. The other half is for
    the logits, and for K before it is converted. With an fp8 cache that takes three quarters of
    what K as float32 takes.
    """
    return min(MOST_MEMORY, memory // SHARE_OF_MEMORY) // 2


@functools.cache
def wave_bytes(device: torch.device) -> int:
    """The most bytes that a wave's K may take as float32. Its V may take as many.

    On a CPU a wave stays in the processor's caches. `meta` has a CPU's waves, because a CPU's
    operations are counted there.
    """
    if device.type in ("cpu", "meta"):
        return CPU_WAVE
    if device.type == "cuda" and torch.cuda.is_available():
        return accelerator_wave(torch.cuda.get_device_properties(device).total_memory)
    return MOST_MEMORY // 2  # its memory isn't known
