"""Time calls: synchronised at both ends, the first call kept apart, several calls in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy

from paged_attention.measure.counting import count, tensors_in
from paged_attention.measure.synchronization import Device, Fn, device_measured, synchronizer

MIN_SAMPLES = 3  # quartiles of fewer say nothing
BLOCK_SECONDS = 1e-3  # shorter calls are timed several at a time


@dataclass(frozen=True)
class Measurement:
    """What a call costs. Times are seconds per call.

    seconds:      median
    spread:       lower and upper quartile
    cold_seconds: the first call, which the other figures leave out
    runs:         timed calls in all
    ops, gemms, host_reads, peak_bytes: counted, see `counting.Counts`
    device:       where it ran
    samples:      what the median is taken of; short calls are timed in blocks, a sample a block
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


def measure(
    fn: Fn,
    *,
    device: Device | None = None,
    synchronize: Fn | None = None,
    min_seconds: float = 0.5,
) -> Measurement:
    """What a call costs: its time, and what it asks of the device.

    Args:    fn: takes no arguments and may be called any number of times
             device: "cpu", "cuda", "cuda:1" or a torch.device; None: the one that the tensors of
                   fn's results and operations live on, the CPU if there are none
             synchronize: waits for the device. Any device but a CPU or a CUDA device needs it. It
                   is trusted: nobody looks where fn's tensors live
             min_seconds: how long to sample at least; there are never fewer than 3 samples
    Returns: Measurement
    Raises:  ValueError: nothing waits for the device, or fn works on another device than stated;
             then the time would leave out work. TypeError: fn or synchronize can't be called
    Cost:    min_seconds, and 3 calls more: one cold, one counted, one to size the samples
    """
    return interleaved(
        {"fn": fn}, device=device, synchronize=synchronize, min_seconds=min_seconds, rounds=1
    )["fn"]


def interleaved(
    fns: Mapping[str, Fn],
    *,
    device: Device | None = None,
    synchronize: Fn | None = None,
    min_seconds: float = 0.5,
    rounds: int = 6,
) -> dict[str, Measurement]:
    """Measure several callables in one run: they take turns, so that a busy moment hits them all.

    Every other round goes backwards, so that each call follows each of its neighbours.

    Args:    fns: by name, in the order of a round
             device, synchronize: as for `measure`
             min_seconds: of sampling for each, spread over the rounds
             rounds: turns that each one gets; a slow one takes one sample a turn
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


class Trial:
    """A callable that is being measured one sample at a time, so that several can take turns.

    Making a trial calls `fn` three times: once cold, once counted, once to see how long it takes.
    `first_result` is what the cold call returned. Set it to None to free it.

    Args:    fn: takes no arguments
             device, synchronize: as for `measure`
    Raises:  ValueError, TypeError: as `measure`
    """

    def __init__(
        self, fn: Fn, *, device: Device | None = None, synchronize: Fn | None = None
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a callable without arguments, not {fn!r}")
        self._fn = fn
        self._synchronize = synchronizer(device, synchronize)
        self._samples: list[float] = []

        self.cold_seconds, self.first_result = self._time(1)
        self.counts = count(fn)
        if synchronize is None:
            returned = {str(tensor.device) for tensor in tensors_in(self.first_result)}
            device = device_measured(device, self.counts.devices | returned)
            self._synchronize = synchronizer(device, None)
        self.device = "unknown" if device is None else str(device)

        estimate, _ = self._time(1)
        self._block = 1
        if estimate < BLOCK_SECONDS:
            self._block = min(1000, max(2, round(BLOCK_SECONDS / max(estimate, 1e-6))))
        else:
            self._samples.append(estimate)

    def sample(self, min_seconds: float = 0.0) -> None:
        """Take one sample, and more until they have taken `min_seconds` together."""
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
        """What the samples so far say. Raises ValueError if there is none yet."""
        if not self._samples:
            raise ValueError("nothing measured yet: call sample() first")
        low, high = numpy.quantile(self._samples, (0.25, 0.75)).tolist()
        return Measurement(
            seconds=statistics.median(self._samples),
            spread=(low, high),
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
        """Seconds per call over `calls` calls, and what the last one returned."""
        result = None
        self._synchronize()  # what was launched before is not on our clock
        start = time.perf_counter()
        for _ in range(calls):
            result = self._fn()
        self._synchronize()  # what we launched is
        return (time.perf_counter() - start) / calls, result


def in_turns(trials: Iterable[Trial], number: int) -> list[Trial]:
    """The order of round `number`: forwards in rounds 0, 2, ..., backwards in the others."""
    return list(trials)[:: -1 if number % 2 else 1]
