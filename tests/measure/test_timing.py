"""A time is that of the work, waited for, or it is refused."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import cuda

from paged_attention import measure as m
from paged_attention.measure import timing
from paged_attention.measure.synchronization import device_measured

quick = pytest.mark.quick
X = torch.arange(60.0).view(5, 12) / 7


class Clock:
    """A clock that stands still, but for what the work under test takes."""

    def __init__(self, monkeypatch):
        self.now, self.events = 1000.0, []
        monkeypatch.setattr(timing.time, "perf_counter", self.read)

    def read(self):
        self.events.append("clock")
        return self.now

    def work(self, *durations):
        """A callable that takes these times, then the last one for ever."""
        left = list(durations)

        def fn():
            self.events.append("launch")
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return fn

    def sync(self):
        self.events.append("sync")


@quick
def test_an_asynchronous_devices_time_is_the_works_not_the_launchs():
    done_at = 0.0

    def launch():
        nonlocal done_at
        done_at = time.perf_counter() + 0.05

    def synchronize():
        time.sleep(max(0.0, done_at - time.perf_counter()))

    result = m.measure(launch, device="stub", synchronize=synchronize, min_seconds=0.2)
    assert min(result.samples) >= 0.05
    assert result.seconds >= 0.05 and result.cold_seconds >= 0.05
    assert result.runs == len(result.samples)
    assert result.device == "stub"


@quick
def test_every_sample_synchronises_before_it_starts_and_before_it_stops(monkeypatch):
    clock = Clock(monkeypatch)
    m.measure(clock.work(0.05), device="stub", synchronize=clock.sync, min_seconds=0.2)
    cold, rest = clock.events[:5], clock.events[6:]
    timed_call = ["sync", "clock", "launch", "sync", "clock"]
    assert cold == timed_call
    assert clock.events[5] == "launch"  # the counted call, which isn't timed
    assert rest == timed_call * (len(rest) // 5) and len(rest) >= 4 * 5


@quick
def test_short_calls_are_timed_in_blocks_and_divided_once(monkeypatch):
    clock = Clock(monkeypatch)
    result = m.measure(clock.work(2e-5), device="stub", synchronize=clock.sync, min_seconds=0.01)
    assert result.seconds == pytest.approx(2e-5, rel=1e-6)
    assert result.samples == pytest.approx([2e-5] * len(result.samples), rel=1e-6)
    assert result.runs == 50 * len(result.samples)  # blocks of a millisecond
    assert clock.events.count("launch") == result.runs + 3  # cold, counted, and one to size


@quick
def test_the_cold_call_is_apart_and_median_and_quartiles_are_of_the_rest(monkeypatch):
    clock = Clock(monkeypatch)
    fn = clock.work(100.0, 50.0, 1.0, 5.0, 2.0, 4.0, 3.0)  # cold, counted, five samples
    result = m.measure(fn, device="cpu", min_seconds=14.0)
    assert result.cold_seconds == 100.0
    assert sorted(result.samples) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (result.seconds, result.spread, result.runs) == (3.0, (2.0, 4.0), 5)


@quick
def test_a_slow_call_still_has_three_samples(monkeypatch):
    clock = Clock(monkeypatch)
    assert m.measure(clock.work(60.0), device="cpu", min_seconds=0.5).runs == 3


@quick
def test_min_seconds_are_sampled(monkeypatch):
    clock = Clock(monkeypatch)
    assert sum(m.measure(clock.work(0.03), device="cpu", min_seconds=0.5).samples) >= 0.5


@quick
def test_interleaved_takes_turns(monkeypatch):
    clock, order = Clock(monkeypatch), []

    def work(name):
        takes_a_second = clock.work(1.0)
        return lambda: (order.append(name), takes_a_second())

    results = m.interleaved({"a": work("a"), "b": work("b")}, min_seconds=0, rounds=4)
    assert "".join(order) == "aaa" + "bbb" + "abbaabba"  # there and back
    assert [result.runs for result in results.values()] == [5, 5]


@quick
@pytest.mark.parametrize("device", ["mps", "xpu:1", "stub", "meta", torch.device("meta")])
def test_a_device_that_nothing_waits_for_is_refused_before_anything_runs(device):
    ran = []
    with pytest.raises(ValueError, match=f"device='{device}' needs synchronize="):
        m.measure(lambda: ran.append(1), device=device)
    assert not ran


@quick
def test_a_device_inferred_that_nothing_waits_for_is_refused():
    with pytest.raises(ValueError, match="device='meta' needs synchronize="):
        m.measure(lambda: X.to("meta"))


@quick
def test_working_on_another_device_than_stated_is_refused_naming_both():
    with pytest.raises(ValueError, match="device='cpu', but fn works on meta"):
        m.measure(lambda: X.to("meta"), device="cpu")
    hidden = []
    with pytest.raises(ValueError, match="device='cpu', but fn works on meta"):
        m.measure(lambda: hidden.append(X.to("meta")), device="cpu")  # not in what it returns


@quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_cuda_is_refused():
    with pytest.raises(ValueError, match="device='cuda', but PyTorch sees no CUDA device"):
        m.measure(lambda: X + 1, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("device", [cuda])
def test_cuda_stated_for_work_on_the_cpu_is_refused(device):
    with pytest.raises(ValueError, match="device='cuda', but fn works on cpu"):
        m.measure(lambda: X + 1, device=device)
    assert m.measure(lambda: X.to(device) + 1, min_seconds=0.01).device == "cuda:0"


@quick
def test_tensors_on_the_cpu_beside_a_devices_are_no_second_device():
    assert device_measured(None, set()) == device_measured("cpu:0", {"cpu"}) == "cpu"
    assert device_measured(None, {"cpu", "cuda:1"}) == "cuda:1"
    assert device_measured("cuda:1", {"cpu", "cuda:1"}) == "cuda:1"
    with pytest.raises(ValueError, match="fn works on cuda:0 and cuda:1: pass device="):
        device_measured(None, {"cuda:0", "cuda:1"})
    for touched in ({"cpu"}, {"cpu", "cuda:0"}):
        with pytest.raises(ValueError, match="device='cuda:1', but fn works on c"):
            device_measured("cuda:1", touched)


@quick
def test_the_device_is_inferred_from_results_and_ops():
    assert m.measure(lambda: X + 1, min_seconds=0.001).device == "cpu"
    assert m.measure(lambda: None, min_seconds=0.001).device == "cpu"


@quick
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fn": 3}, TypeError, "fn must be a callable without arguments, not 3"),
        ({"fn": X.sum, "synchronize": 3}, TypeError, "synchronize must be a callable, not 3"),
        ({"fn": X.sum, "min_seconds": -1}, ValueError, "min_seconds=-1"),
        ({"fn": X.sum, "min_seconds": float("nan")}, ValueError, "min_seconds=nan"),
    ],
)
def test_a_malformed_call_names_the_argument_and_its_value(arguments, error, words):
    with pytest.raises(error, match=words):
        m.measure(**arguments)
    with pytest.raises(ValueError, match="rounds=0"):
        m.interleaved({"a": X.sum}, rounds=0)


@quick
def test_a_measurement_holds_its_counts():
    result = m.measure(lambda: (X @ X.t()).sum().item(), min_seconds=0.001)
    assert (result.ops, result.gemms, result.host_reads) == (3, 1, 1)
    assert result.peak_bytes == 5 * 5 * 4 + 4
