"""Where a call's time goes: every operation is of one kind, and its own time is added to it.

No time is measured here. Which operations run is the profiler's word; what they take is made up.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from paged_attention.inputs import random_inputs
from paged_attention.measure import profiling
from paged_attention.measure.profiling import KINDS, breakdown, kind_of
from paged_attention.stages import STAGES

pytestmark = pytest.mark.quick
X = torch.ones(2, 40, 40)
INDEX = torch.tensor([1, 0, 1])

CALLS = {
    "gather": [lambda: X[INDEX], lambda: X.index_select(1, INDEX)],
    "copies": [lambda: X.transpose(1, 2).contiguous(), lambda: X.repeat_interleave(2, dim=0)],
    "fills": [lambda: torch.zeros(3000), lambda: X.new_full((4, 5), 2.0)],
    "GEMMs": [lambda: torch.bmm(X, X), lambda: torch.mv(X[0], X[0, 0])],
    "softmax, merge": [lambda: torch.softmax(X, -1), lambda: (X - X.exp()) / X],
    "other": [lambda: X.tan(), lambda: X.cumsum(0)],
}


def kinds_in(fn):
    with torch.profiler.profile() as profiler:
        fn()
    return {kind_of(e.key) for e in profiler.key_averages() if e.key.startswith("aten::")}


@pytest.mark.parametrize(("kind", "fn"), [(kind, fn) for kind, fns in CALLS.items() for fn in fns])
def test_an_operation_is_of_its_kind(kind, fn):
    assert {kind} <= kinds_in(fn) <= {kind, "other"}  # memory is asked for, too


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_stage_copies_multiplies_and_merges(stage):
    inputs = random_inputs([200], num_heads=4, num_kv_heads=2, head_size=16)
    kinds = kinds_in(lambda: stage(*inputs, 0.25, 64))
    assert {"copies", "GEMMs", "softmax, merge"} <= kinds <= set(KINDS)


def profiles_of(monkeypatch, *runs):
    """The profiler says of each run that it had these operations: {name: microseconds}."""
    profiles = iter(runs)

    def profile():
        return nullcontext(SimpleNamespace(key_averages=lambda: next(profiles)))

    monkeypatch.setattr(profiling, "profile", profile)


def op(name, cpu, **on_device):
    return SimpleNamespace(key=name, self_cpu_time_total=cpu, **on_device)


def test_a_breakdown_is_of_the_median_run_and_calls_once_more_to_warm_up(monkeypatch):
    def run(total):
        times = {"aten::bmm": total - 3, "aten::mm": 2, "aten::view": 1}
        return [op(name, time, self_device_time_total=0) for name, time in times.items()]

    profiles_of(monkeypatch, run(70), run(30), run(50))
    calls = []
    seconds = breakdown(lambda: calls.append(1), runs=3)
    assert len(calls) == 1 + 3
    assert tuple(seconds) == KINDS
    expected = {**dict.fromkeys(KINDS, 0.0), "GEMMs": 49e-6, "other": 1e-6}
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize("name", ["self_device_time_total", "self_cuda_time_total"])
def test_on_a_device_times_are_those_of_its_kernels_and_of_operations_alone(name, monkeypatch):
    ops = [op("aten::bmm", 9, **{name: 400}), op("aten::fill_", 9, **{name: 0})]
    profiles_of(monkeypatch, [*ops, op("cudaLaunchKernel", 9, **{name: 5})])
    seconds = breakdown(lambda: None, runs=1)
    assert {kind: s for kind, s in seconds.items() if s} == pytest.approx({"GEMMs": 400e-6})


def test_no_runs_is_an_error():
    with pytest.raises(ValueError, match="runs=0"):
        breakdown(lambda: None, runs=0)
