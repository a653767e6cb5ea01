"""Device profiles: the few figures of a device that decide how fast decode can be.

A decode step moves bytes and launches operations. A profile says what each costs. Every figure
stands with its source. A figure that nobody has published stays None, and one that was taken from
another device says so. Nothing here is measured at import, because `measure.calibrate` does that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_attention.kernel.device import CPU_WAVE, LAUNCH, accelerator_wave, peak_bandwidth


@dataclass(frozen=True)
class Figure:
    """A quantity as a band. low == high where there is one value."""

    low: float
    high: float
    unit: str
    source: str


@dataclass(frozen=True)
class DeviceProfile:
    """What a prediction needs to know.

    name: as printed
    bandwidth: bytes per second that reading a large tensor reaches
    op_cost: seconds that an operation costs whatever its size (dispatch, launch)
    num_sms: multiprocessors, None on a CPU
    rearrange_bandwidth: bytes per second, read and written together, that a copy reaches if it
        permutes or repeats. None: as fast as bandwidth
    fresh_page_cost: seconds that a byte costs on top when it is the first written to its page,
        because the system has to hand out the page. None where that doesn't happen, as on a GPU,
        whose allocator keeps what it has
    fresh_from: the size in bytes from which on the allocator asks the system for memory on each
        call. None where it never does
    wave: bytes of K, or of V, as float32, that a wave may hold. None where it follows from
        bandwidth and op_cost
    """

    name: str
    bandwidth: Figure | None
    op_cost: Figure | None
    num_sms: Figure | None = None
    rearrange_bandwidth: Figure | None = None
    fresh_page_cost: Figure | None = None
    fresh_from: int | None = None
    wave: Figure | None = None

    @property
    def wave_bytes(self) -> int:
        """The most bytes of K, or of V, as float32, that are gathered at once."""
        if self.wave is not None:
            return int(self.wave.high)
        if self.op_cost is None or self.bandwidth is None:
            raise ValueError(f"profile {self.name!r} must have a wave, or bandwidth and op_cost")
        return accelerator_wave(self.bandwidth.high, self.op_cost.high)


_LAUNCH = Figure(
    4e-6,
    LAUNCH,
    "s",
    "4 to 6 us to submit one CUDA kernel, measured by others on an RTX 5070 Ti "
    "(susun-blog.com, pegainfer 3, CUDA 13.0). Assumed here, not measured on this device",
)

PROFILES = {
    "cpu": DeviceProfile(
        "cpu",
        bandwidth=None,  # machines differ by a factor of ten: measure.calibrate("cpu")
        op_cost=None,
        wave=Figure(
            CPU_WAVE,
            CPU_WAVE,
            "B",
            "2,048 tokens of 4 KV heads of 256 lanes. On a 2-core Xeon with 2 MiB of L2 a core, "
            "waves of half the size took 1.1 to 1.15 times as long, and larger ones no less",
        ),
    ),
    "BI-V100": DeviceProfile(
        "BI-V100",
        bandwidth=Figure(
            584e9,
            1.2e12,
            "B/s",
            "low: one public measurement of a BI-V100 (its sibling BI150: 590 GB/s, FlagPerf, "
            "main_memory-bandwidth/iluvatar). high: the vendor's figure for 32 GiB of HBM2",
        ),
        op_cost=_LAUNCH,
        num_sms=Figure(16, 16, "", "the change notes of a vLLM port, unverified elsewhere"),
    ),
    "H200": DeviceProfile(
        "H200",
        bandwidth=Figure(4.8e12, 4.8e12, "B/s", "NVIDIA H200 data sheet, 141 GB of HBM3e"),
        op_cost=_LAUNCH,
        num_sms=Figure(132, 132, "", "NVIDIA H200 data sheet (SXM)"),
    ),
}


def profile_of(device: str | torch.device) -> DeviceProfile:
    """The profile of the device at hand.

    A known CUDA device is found by its name, and another one's bandwidth is read from CUDA's
    properties. `meta` has a CPU's profile, because a CPU's operations are counted there.
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return PROFILES["cpu"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    for known, profile in PROFILES.items():
        if known in name:
            return profile
    peak = peak_bandwidth(device)
    source = "get_device_properties: memory clock and bus width; assumed where they are missing"
    return DeviceProfile(name, Figure(peak, peak, "B/s", source), _LAUNCH)
