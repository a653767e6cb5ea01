"""Device profiles: the few figures of a device that decide how fast decode can be.

A decode step moves bytes and runs operations. A profile says what each costs. Every figure stands
with its source. Where nobody has published a figure for a device, it is derived from another one
by a ratio, and its source begins with "derived". Nothing here is measured at import, because
`measure.calibrate` does that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_attention.kernel.device import CPU_WAVE, MOST_MEMORY, accelerator_wave


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
    op_cost: seconds that the host spends on an operation whatever its size. On a CPU, where host
        and device are one, it is all that an operation costs beside its bytes
    num_sms: multiprocessors, None on a CPU
    rearrange_bandwidth: bytes per second, read and written together, that a copy reaches if it
        permutes or repeats. None: as fast as bandwidth
    gather_bandwidth: the same of an operation that picks rows. None: as fast as bandwidth
    gemm_bandwidth: the same of a matrix product with few rows. None: as fast as bandwidth
    launch: seconds that a device spends on an operation whatever its size. The device works while
        the host prepares the next operation. None: host and device are one, and take turns
    host_read: seconds that the host spends on top where it waits for a value from the device
    fresh_page_cost: seconds that a byte costs on top when it is the first written to its page,
        because the system has to hand out the page. None where that doesn't happen, as on a GPU,
        whose allocator keeps what it has
    fresh_from: the size in bytes from which on the allocator asks the system for memory on each
        call. None where it never does
    wave: bytes of K, or of V, as float32, that a wave may hold
    """

    name: str
    bandwidth: Figure | None
    op_cost: Figure | None
    num_sms: Figure | None = None
    rearrange_bandwidth: Figure | None = None
    gather_bandwidth: Figure | None = None
    gemm_bandwidth: Figure | None = None
    launch: Figure | None = None
    host_read: Figure | None = None
    fresh_page_cost: Figure | None = None
    fresh_from: int | None = None
    wave: Figure | None = None

    @property
    def wave_bytes(self) -> int:
        """The most bytes of K, or of V, as float32, that are gathered at once."""
        return int(self.wave.high) if self.wave is not None else MOST_MEMORY // 2


def gpu_profile(
    name: str, bandwidth: Figure, *, memory: int | None = None, num_sms: Figure | None = None
) -> DeviceProfile:
    """The profile of an NVIDIA GPU of which a data sheet's bandwidth is known.

    The other figures are what others measured on such GPUs, as shares of the bandwidth.

    Args:    memory: bytes, None if unknown
    """

    def share(low: float, high: float, why: str) -> Figure:
        source = f"derived: {low:.0%} to {high:.0%} of the bandwidth. {why}"
        return Figure(low * bandwidth.low, high * bandwidth.high, "B/s", source)

    return DeviceProfile(
        name,
        bandwidth,
        _EAGER_OP,
        num_sms,
        rearrange_bandwidth=share(0.3, 0.8, "As of gathers, which also move rows to other places"),
        gather_bandwidth=share(0.3, 0.8, _GATHERS),
        gemm_bandwidth=share(0.5, 1.0, "A stated ratio, for want of measurements"),
        launch=_LAUNCH,
        host_read=_HOST_READ,
        wave=None if memory is None else _wave(memory),
    )


def _wave(memory: int) -> Figure:
    wave = accelerator_wave(memory)
    return Figure(wave, wave, "B", "kernel/device.py, which limits a wave's memory")


# Where the figures come from. Each page was read, those of a repository in the commit named.
_WORKLOG = "dylanyunlon/project_6 552f1448, kernel_worklog.md"
_M1_18 = "wudixzy/competition 2f7d5f57, M1_18_EXACT_QK_COMPONENT_PROFILE"
_GATHERS = """on an H100 a gather of 2 bytes a thread reaches 27 % of it, one of 16 bytes a thread
79 % (pegainfer-project/pegainfer#484 and pegainfer-project/pegainfer#488)"""
_LAUNCHES = """4 to 6 us to submit one CUDA kernel, measured by others on an RTX 5070 Ti, CUDA 13.0
(https://susun-blog.com/blog/pegainfer-3-cuda-graph). Assumed here, not measured on this device"""
_OPERATIONS = """5 to 25 us of a CPU's work before a kernel starts, an H100's matmul
(https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html).
Assumed here, not measured on this device"""
_CPUS_WAVE = """2,048 tokens of 4 KV heads of 256 lanes. On a 2-core Xeon with 2 MiB of L2 a core,
waves of half the size took 1.1 to 1.15 times as long, and larger ones no less"""
_COPY = f"""low: a contiguous copy of 128 MB ({_WORKLOG}, which doesn't say whether reads and
writes both count). high: the vendor's figure for 32 GiB of HBM2"""
_PERMUTE = f"""a hand-written kernel that gathers, permutes and widens. low: K alone at 65,536
tokens, 101 MB in 2.975 ms. high: K and V at 100,000 tokens, 307 MB in 2.923 ms ({_M1_18}).
Nobody has published PyTorch's own copies"""
_SELECT = f"""index_select of 4.2 MB in 66 us and 8.4 MB in 115 us, which is 64 and 73 GB/s
read, and as many written ({_WORKLOG})"""
_PRODUCTS = f"""low: weights times V, 102 MB in 3.519 ms ({_M1_18}). high: one row times a matrix
of 622 MB in 6.481 ms ({_WORKLOG}, which has 34 GB/s for 4.2 MB)"""

_LAUNCH = Figure(4e-6, 6e-6, "s", _LAUNCHES)
_EAGER_OP = Figure(5e-6, 25e-6, "s", _OPERATIONS)
_HOST_READ = Figure(5e-6, 25e-6, "s", "derived: as long as an operation takes on the host")

PROFILES = {
    "cpu": DeviceProfile(
        "cpu",
        bandwidth=None,  # machines differ by a factor of ten: measure.calibrate("cpu")
        op_cost=None,
        wave=Figure(CPU_WAVE, CPU_WAVE, "B", _CPUS_WAVE),
    ),
    "BI-V100": DeviceProfile(
        "BI-V100",
        bandwidth=Figure(584e9, 1.2e12, "B/s", _COPY),
        op_cost=Figure(20e-6, 30e-6, "s", f"a whole operation of PyTorch ({_WORKLOG})"),
        num_sms=Figure(16, 16, "", "dylanyunlon/project_6 56d0c186, muh/include/muh/hardware.cuh"),
        rearrange_bandwidth=Figure(34e9, 105e9, "B/s", _PERMUTE),
        gather_bandwidth=Figure(127e9, 146e9, "B/s", _SELECT),
        gemm_bandwidth=Figure(29e9, 96e9, "B/s", _PRODUCTS),
        launch=Figure(6.2e-6, 6.2e-6, "s", f"an empty kernel ({_WORKLOG})"),
        host_read=Figure(20e-6, 30e-6, "s", _HOST_READ.source),
        wave=_wave(34_057_748_480),  # wudixzy/competition 2f7d5f57, BI100_MACHINE_TRIAGE_LOG
    ),
    "H200": gpu_profile(
        "H200",
        Figure(4.8e12, 4.8e12, "B/s", "NVIDIA H200 data sheet, 141 GB of HBM3e"),
        memory=141_000_000_000,
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
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # In kHz and bits, and not in every version of torch. There are two transfers a clock.
    clock = getattr(properties, "memory_clock_rate", 0)
    peak = 2 * clock * 1e3 * getattr(properties, "memory_bus_width", 0) / 8 or 1e12
    source = "get_device_properties: memory clock and bus width; 1 TB/s where they are missing"
    memory = getattr(properties, "total_memory", None)
    return gpu_profile(name, Figure(peak, peak, "B/s", source), memory=memory)
