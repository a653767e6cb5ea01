"""Time one callable honestly: synchronised at both ends, its first call kept apart.

`measure.measure` and `measure.interleaved` are what to call; this file is how they work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from paged_attention.measure.counting import Counts, count, tensors_in

MIN_SAMPLES = 3  # whatever a call costs: quartiles of fewer say nothing
BLOCK_SECONDS = 1e-3  # calls shorter than this are timed several at a time


@dataclass(frozen=True)
class Measurement:
    """What a call costs. Times are seconds per call.

    seconds:      median
    spread:       lower and upper quartile
    cold_seconds: the first call, which is in none of the other figures
    runs:         timed calls in all
    ops, gemms, host_reads, peak_bytes: counted, see `counting.OpCounter`
    device:       where it ran
    samples:      what the median is taken of; short calls are timed in blocks, one sample each
    """

    seconds: float
    spread: tuple[float, float]
    cold_seconds: float
    runs: int
    ops: int
    gemms: int
    host_reads: int
    peak_bytes: int
    device: str
    samples: tuple[float, ...] = field(repr=False)


class Trial:
    """One callable being measured, a sample at a time, so that several can take turns.

    Making it calls `fn` three times: once cold, once counted, once to see how long it takes.
    `first_result` is what the cold call returned; set it to None to free it.

    Args:    fn: takes no arguments
             device, synchronize: as for `measure.measure`
    Raises:  ValueError, TypeError: as `measure.measure`
    """

    first_result: object
    counts: Counts

    def __init__(self, fn: Callable[[], object], *, device=None, synchronize=None) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a callable without arguments, not {fn!r}")
        self._fn = fn
        self._synchronize = _synchronizer(device, synchronize)
        self._samples: list[float] = []

        self.cold_seconds, self.first_result = self._time(1)
        self.counts = count(fn)
        touched = self.counts.devices | {str(t.device) for t in tensors_in(self.first_result)}
        if synchronize is None:
            device = _device_measured(device, touched)
            self._synchronize = _synchronizer(device, None)
        self.device = "unknown" if device is None else str(device)

        estimate, _ = self._time(1)
        self._block = 1
        if estimate < BLOCK_SECONDS:
            self._block = min(1000, max(2, round(BLOCK_SECONDS / max(estimate, 1e-6))))
        else:
            self._samples.append(estimate)

    def sample(self, min_seconds: float = 0.0) -> None:
        """Take one sample, and further ones until they last `min_seconds` together."""
        spent = 0.0
        while True:
            seconds, _ = self._time(self._block)
            self._samples.append(seconds)
            spent += seconds * self._block
            if spent >= min_seconds:
                return

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def measurement(self) -> Measurement:
        """What the samples so far say. Raises ValueError while there is none."""
        if not self._samples:
            raise ValueError("nothing measured yet: call sample() first")
        return Measurement(
            seconds=statistics.median(self._samples),
            spread=_quartiles(self._samples),
            cold_seconds=self.cold_seconds,
            runs=len(self._samples) * self._block,
            ops=self.counts.ops,
            gemms=self.counts.gemms,
            host_reads=self.counts.host_reads,
            peak_bytes=self.counts.peak_bytes,
            device=self.device,
            samples=tuple(self._samples),
        )

    def _time(self, calls: int) -> tuple[float, object]:
        """Seconds per call over `calls` calls, and the last one's result."""
        self._synchronize()  # what was launched before is not on our clock
        start = time.perf_counter()
        for _ in range(calls):
            result = self._fn()
        self._synchronize()  # what we launched is
        return (time.perf_counter() - start) / calls, result


def _quartiles(samples: list[float]) -> tuple[float, float]:
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def _synchronizer(device, synchronize) -> Callable[[], object]:
    """What waits until the device has done its work; everything CUDA while it isn't known yet."""
    if synchronize is not None:
        if not callable(synchronize):
            raise TypeError(f"synchronize must be a callable, not {synchronize!r}")
        return synchronize
    kind = None if device is None else str(device).partition(":")[0]
    if kind == "cpu":
        return lambda: None
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}, but PyTorch sees no CUDA device here")
        return lambda: torch.cuda.synchronize(device)
    if kind is None:
        return _synchronize_all_cuda
    raise ValueError(
        f"device={str(device)!r} needs synchronize=, a callable that returns once the device has "
        "done its work: a time that wasn't synchronised is refused"
    )


def _synchronize_all_cuda() -> None:
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def _device_measured(stated, touched) -> str:
    """The one device to wait for, given the devices that fn's tensors live on.

    Host tensors beside a device's are no second device; a device that isn't waited for is.
    """
    others = sorted(device for device in touched if device != "cpu")
    if stated is None:
        if len(others) > 1:
            raise ValueError(
                f"fn works on {' and '.join(others)}: pass device=, or synchronize= for all"
            )
        return others[0] if others else "cpu"
    wanted = "cpu" if torch.device(stated).type == "cpu" else str(stated)
    if wanted == "cuda":
        wanted = f"cuda:{torch.cuda.current_device()}"
    wrong = [device for device in others if device != wanted]
    if wanted != "cpu" and not others and touched:
        wrong = ["cpu"]
    if wrong:
        raise ValueError(
            f"device={str(stated)!r}, but fn works on {' and '.join(wrong)}: "
            "waiting for one device says nothing of another"
        )
    return wanted


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
