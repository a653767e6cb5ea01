"""Device profiles: what little of a device decides how fast decode can be.

A decode step moves bytes and launches operations; a profile says what each costs. Every figure
stands with its source, a figure nobody has published stays None, and a figure taken from another
device says so. Nothing here is measured at import: `measure.calibrate` measures a profile.
"""

from dataclasses import dataclass


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
          gathers or permutes; None: as fast as bandwidth
    fresh_page_cost: seconds a byte costs on top when it is the first written to its page: the
          system has to hand out the page. None where that doesn't happen: a GPU's allocator
          keeps what it has
    fresh_from: bytes from which on the allocator asks the system for a temporary anew on each
          call, None where it never does
    """

    name: str
    bandwidth: Figure | None
    op_cost: Figure | None
    num_sms: Figure | None = None
    rearrange_bandwidth: Figure | None = None
    fresh_page_cost: Figure | None = None
    fresh_from: int | None = None


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
