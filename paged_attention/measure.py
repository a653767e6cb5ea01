"""Measure a call: time, ops, GEMMs, host reads, memory; and this machine's own yardsticks.

m = measure(lambda: paged_attention(query, key_cache, ...))
m.seconds, m.spread, m.cold_seconds, m.ops, m.peak_bytes

floor(num_bytes).seconds          what reading that many bytes takes at the least, here
interleaved({"a": f, "b": g})     both in one run, taking turns: use it to compare
profiler_peak_bytes(f)            a second opinion on peak_bytes, from inside the kernels
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .allocators import allocator_peak_bytes, profiler_peak_bytes
from .counting import Counts, OpCounter, count
from .device import DeviceProfile, Figure, profile_of
from .machine import device_name
from .timing import MIN_SAMPLES, Measurement, Trial

__all__ = [
    "Counts",
    "Floor",
    "Measurement",
    "OpCounter",
    "Trial",
    "allocator_peak_bytes",
    "calibrate",
    "count",
    "device_name",
    "floor",
    "FloorReader",
    "in_turns",
    "interleaved",
    "kv_bytes",
    "measure",
    "profiler_peak_bytes",
]

_FLOOR_COLUMNS = 4096
_MALLOC_KEEPS = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: larger ones go back to the system


def measure(
    fn: Callable[[], object], *, device=None, synchronize=None, min_seconds: float = 0.5
) -> Measurement:
    """What `fn()` costs: its time, synchronised, and what it asks of the device.

    Args:    fn: takes no arguments and may be called any number of times
             device: "cpu", "cuda", "cuda:1" or a torch.device; None: the one that the tensors of
                   fn's results and ops live on, the CPU if there are none
             synchronize: waits for the device; needed for any device but CPU and CUDA, and then
                   trusted: where fn's tensors live isn't looked at
             min_seconds: how long to sample at least; never fewer than 3 samples
    Returns: Measurement
    Raises:  ValueError: a device that nothing waits for, or fn working on another one than
             stated: a time that wasn't synchronised is refused. TypeError: not callable
    Cost:    min_seconds, and 3 calls more: the cold one, the counted one, one to size the rest
    """
    return interleaved(
        {"fn": fn}, device=device, synchronize=synchronize, min_seconds=min_seconds, rounds=1
    )["fn"]


def interleaved(
    fns: Mapping[str, Callable[[], object]],
    *,
    device=None,
    synchronize=None,
    min_seconds: float = 0.5,
    rounds: int = 6,
) -> dict[str, Measurement]:
    """Measure several callables in one run, taking turns, so that a busy moment hits them all, and
    in turned order every other round, so that it doesn't matter which one comes after which.

    Args:    fns: by name; the order of a round
             min_seconds: of sampling for each, spread over the rounds
             rounds: turns that each one gets; a slow one has one sample a turn
             device, synchronize: as for `measure`
    Returns: {name: Measurement}
    Raises:  as `measure`; ValueError: rounds < 1 or min_seconds < 0
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    if not 0 <= min_seconds < float("inf"):
        raise ValueError(f"min_seconds={min_seconds} must be finite and not negative")
    trials = {}
    for name, fn in fns.items():
        trials[name] = Trial(fn, device=device, synchronize=synchronize)
        trials[name].first_result = None
    for number in range(rounds):
        for trial in in_turns(trials.values(), number):
            trial.sample(min_seconds / rounds)
    for trial in trials.values():
        while trial.num_samples < MIN_SAMPLES:
            trial.sample()
    return {name: trial.measurement() for name, trial in trials.items()}


def in_turns(trials, number: int) -> list:
    """The order of round `number`, from 0: there and back."""
    return list(trials) if number % 2 == 0 else list(trials)[::-1]


@dataclass(frozen=True)
class Floor:
    """How fast this device reads memory, in the access pattern of decode.

    measurement: of the reading alone
    num_bytes:   bytes read
    """

    measurement: Measurement
    num_bytes: int

    @property
    def seconds(self) -> float:
        return self.measurement.seconds

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.measurement.seconds / 1e9


def floor(num_bytes: int, *, device="cpu", synchronize=None, min_seconds: float = 0.5) -> Floor:
    """The yardstick: no decode step reads K and V faster than `torch.mv` does.

    Args:    num_bytes: of K and V together, see `kv_bytes`
             device, synchronize, min_seconds: as for `measure`
    Returns: Floor, of the bytes rounded up to whole rows of 16 KiB
    Cost:    num_bytes of memory
    """
    read = FloorReader(num_bytes, device=device)
    measurement = measure(read, device=device, synchronize=synchronize, min_seconds=min_seconds)
    return Floor(measurement, read.num_bytes)


class FloorReader:
    """A callable that reads `num_bytes` as the floor does: two `torch.mv`, K's half and V's, each
    viewed as float32 (rows, 4096), against ones, all threads. To be measured beside what it is
    the yardstick for, in the same `interleaved` run."""

    def __init__(self, num_bytes: int, *, device="cpu") -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes} must be at least 1")
        rows = -(-num_bytes // (2 * 4 * _FLOOR_COLUMNS))
        self.key, self.value = (
            torch.ones(rows, _FLOOR_COLUMNS, dtype=torch.float32, device=device)  # real pages
            for _ in range(2)
        )
        self.ones = torch.ones(_FLOOR_COLUMNS, dtype=torch.float32, device=device)
        self.num_bytes = 2 * rows * _FLOOR_COLUMNS * 4

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mv(self.key, self.ones), torch.mv(self.value, self.ones)


def kv_bytes(num_tokens: int, num_kv_heads: int, head_size: int, dtype=torch.float32) -> int:
    """Bytes of K and V together that `num_tokens` cached tokens hold, in one layer."""
    return 2 * num_tokens * num_kv_heads * head_size * dtype.itemsize


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
