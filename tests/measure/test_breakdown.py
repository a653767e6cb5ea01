"""Where a call's time goes: every operation lands in its kind, and in one only."""

import time

import pytest
import torch

from paged_attention.inputs import random_inputs
from paged_attention.measure.profiling import KINDS, breakdown
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


@pytest.mark.parametrize(("kind", "fn"), [(kind, fn) for kind, fns in CALLS.items() for fn in fns])
def test_an_operations_time_is_under_its_kind(kind, fn):
    seconds = breakdown(fn, runs=3)
    assert tuple(seconds) == KINDS
    assert seconds[kind] > 0
    assert {k for k, s in seconds.items() if s > 0} <= {kind, "other"}  # memory is asked for, too


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_stages_kinds_add_up_to_no_more_than_its_time(stage):
    inputs = random_inputs([200], num_heads=4, num_kv_heads=2, head_size=16)
    longest = []

    def timed():
        start = time.perf_counter()
        stage(*inputs, 0.25, 64)
        longest.append(time.perf_counter() - start)

    seconds = breakdown(timed, runs=3)
    assert 0 < sum(seconds.values()) <= max(longest)
    assert all(seconds[kind] > 0 for kind in ("copies", "GEMMs", "softmax, merge"))


def test_no_runs_is_an_error():
    with pytest.raises(ValueError, match="runs=0"):
        breakdown(lambda: None, runs=0)
