"""Device profiles: what little of a device decides how fast decode can be.

A decode step moves bytes and launches operations; a profile says what each costs. Every figure
stands with its source, a figure nobody has published stays None, and a figure taken from another
device says so. Nothing here is measured at import: `measure.calibrate` measures a profile.
"""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Figure:
    """A quantity as a band: low == high where there is one value."""

    low: float
    high: float
    unit: str
    source: str


@dataclass(frozen=True)
class DeviceProfile:
    """What a prediction needs to know.

    name: as printed
    bandwidth: bytes per second that reading a large tensor reaches
    op_cost: seconds an operation costs whatever its size (dispatch, launch)
    num_sms: multiprocessors, None on a CPU
    rearrange_bandwidth: bytes per second, read and written together, that a copy reaches which
          permutes or repeats; None: as fast as bandwidth
    fresh_page_cost: seconds a byte costs on top when it is the first written to its page: the
          system has to hand out the page. None where that doesn't happen: a GPU's allocator
          keeps what it has
    fresh_from: bytes from which on the allocator asks the system for a temporary anew on each
          call, None where it never does
    wave: bytes of K, or of V, as float32, that a wave may hold; None where it follows from
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
    def wave_bytes(self):
        """The most bytes of K, or of V, as float32, that are gathered at once.

        Where launches cost, K and V of a wave take ten times as long to read as its operations
        take to launch: then launches add a tenth.
        """
        if self.wave is not None:
            return int(self.wave.high)
        launches = OPS_PER_WAVE * self.op_cost.high
        return int(AMORTISED * launches * self.bandwidth.high / 2)


OPS_PER_WAVE = 15  # that Phase 1 launches; a test counts them
AMORTISED = 10  # times a wave's launches is what its bytes take

_LAUNCH = Figure(
    4e-6,
    6e-6,
    "s",
    "4 to 6 us to submit one CUDA kernel, measured by others on an RTX 5070 Ti "
    "(susun-blog.com, pegainfer 3, CUDA 13.0); assumed here, not measured on this device",
)

PROFILES = {
    "cpu": DeviceProfile(
        "cpu",
        bandwidth=None,  # machines differ by a factor of ten: measure.calibrate("cpu")
        op_cost=None,
        wave=Figure(
            8 * 2**20,
            8 * 2**20,
            "B",
            "2,048 tokens of 4 KV heads of 256 lanes; on a 2-core Xeon with 2 MiB of L2 a core, "
            "waves of half of it took 1.1 to 1.15 times as long, of twice as much no less",
        ),
    ),
    "BI-V100": DeviceProfile(
        "BI-V100",
        bandwidth=Figure(
            584e9,
            1.2e12,
            "B/s",
            "low: one public measurement of a BI-V100 (its sibling BI150: 590 GB/s, FlagPerf, "
            "main_memory-bandwidth/iluvatar); high: the vendor's figure for 32 GiB of HBM2",
        ),
        op_cost=_LAUNCH,
        num_sms=Figure(16, 16, "", "the change notes of a vLLM port; unverified elsewhere"),
    ),
    "H200": DeviceProfile(
        "H200",
        bandwidth=Figure(4.8e12, 4.8e12, "B/s", "NVIDIA H200 data sheet, 141 GB of HBM3e"),
        op_cost=_LAUNCH,
        num_sms=Figure(132, 132, "", "NVIDIA H200 data sheet (SXM)"),
    ),
}


def profile_of(device):
    """The profile of the device at hand: a known one by its name, or one read from CUDA's
    properties; that of a CPU for a CPU and for `meta`, where a CPU's operations are counted."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return PROFILES["cpu"]
    if device.type != "cuda":
        return _accelerator(device.type)
    return _cuda_profile(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_profile(index):
    properties = torch.cuda.get_device_properties(index)
    for name, profile in PROFILES.items():
        if name in properties.name:
            return profile
    return profile_from_properties(properties)


def profile_from_properties(properties):
    """A profile from `torch.cuda.get_device_properties`.

    Args:    properties: .name and .multi_processor_count; .memory_clock_rate (kHz) and
                   .memory_bus_width (bits) where this version of torch has them
    """
    clock = getattr(properties, "memory_clock_rate", 0)
    width = getattr(properties, "memory_bus_width", 0)
    profile = _accelerator(properties.name)
    bandwidth = profile.bandwidth
    if clock and width:
        peak = 2 * clock * 1e3 * width / 8  # two transfers a clock
        bandwidth = Figure(peak, peak, "B/s", "get_device_properties: memory clock and bus width")
    count = properties.multi_processor_count
    num_sms = Figure(count, count, "", "get_device_properties")
    return DeviceProfile(properties.name, bandwidth, profile.op_cost, num_sms)


def _accelerator(name):
    bandwidth = Figure(1e12, 1e12, "B/s", "not known of this device: assumed")
    return DeviceProfile(name, bandwidth, _LAUNCH)
