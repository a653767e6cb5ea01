"""merge_states: associative, commutative, with an identity, and never NaN."""

from __future__ import annotations

import math

import pytest
import torch
from faults import refused
from helpers import DTYPES, assert_close, assert_same, in_each_layout, on_each_device, rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import INF, NAN, Dense, paged, random

from paged_attention import merge_states, paged_attention

pytestmark = pytest.mark.quick

EXTREMES = [-INF, 0.0, -60000.0, 60000.0, -3e37, 3e37, -3.4e38, 3.4e38, 1e-30, -103.9, 88.8]


def judge(outs, lses):
    """The merge in float64, of one empty state more, so that there is one."""
    outs = torch.cat([outs.double(), torch.zeros(1, *outs.shape[1:])])
    lses = torch.cat([lses.double(), torch.full((1, *lses.shape[1:]), -INF)])
    weights = torch.exp(lses - lses.amax(0).clamp(min=-1e300)).unsqueeze(-1)
    total = (weights * outs.masked_fill(weights == 0, 0.0)).sum(0)
    return total / weights.sum(0).clamp(min=1e-300), torch.logsumexp(lses, 0)


@st.composite
def states(draw, least=0, most=8, dtypes=DTYPES, lse=None):
    """Any states; `out` is NaN wherever lse is -inf, for there it means nothing."""
    num_states = draw(st.integers(least, most))
    shape = draw(st.sampled_from([(1,), (3,), (2, 3), (2, 1, 2)]))
    size = draw(st.sampled_from([1, 2, 7, 16]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    number = st.floats(-30, 30, width=32) | st.sampled_from(EXTREMES) if lse is None else lse
    count = num_states * math.prod(shape)
    lses = torch.tensor(
        draw(st.lists(number, min_size=count, max_size=count)), dtype=torch.float32
    )
    lses = lses.reshape(num_states, *shape)
    outs = torch.randn(num_states, *shape, size, generator=rng)
    outs = outs.masked_fill((lses == -INF)[..., None], NAN).to(draw(st.sampled_from(dtypes)))
    return outs, lses


moderate = st.floats(-30, 30, width=32) | st.just(-INF)


@on_each_device
@given(state=states())
def test_merge_agrees_with_float64(device, state):
    out, lse = merge_states(*(t.to(device) for t in state))
    right, right_lse = judge(*state)
    assert out.dtype == state[0].dtype and lse.dtype == torch.float32
    assert_close(out, right)
    assert_close(lse, right_lse, what="lse")


@given(state=states(least=2, dtypes=(torch.float32,), lse=moderate), data=st.data())
def test_merge_is_associative(state, data):
    """Cut the states anywhere, merge the pieces, merge the results: the same as merging all."""
    outs, lses = state
    cuts = sorted(data.draw(st.sets(st.integers(1, outs.shape[0] - 1))))
    edges = [0, *cuts, outs.shape[0]]
    pieces = [merge_states(outs[a:b], lses[a:b]) for a, b in zip(edges, edges[1:])]
    nested = merge_states(torch.stack([p[0] for p in pieces]), torch.stack([p[1] for p in pieces]))
    right, right_lse = judge(outs, lses)
    assert_close(nested[0], right, extra=4e-6)
    assert_close(nested[1], right_lse, extra=4e-6, what="lse")


@pytest.mark.parametrize("dtype", DTYPES)
@given(state=states(least=1, most=1), before=st.integers(0, 5), after=st.integers(0, 5))
def test_one_state_among_empty_ones_comes_back_bit_for_bit(dtype, state, before, after):
    outs, lses = state[0].to(dtype), state[1]

    def empties(n):
        shape = (n, *outs.shape[1:])
        return torch.full(shape, NAN, dtype=dtype), torch.full(shape[:-1], -INF)

    (left, left_lse), (right, right_lse) = empties(before), empties(after)
    out, lse = merge_states(torch.cat([left, outs, right]), torch.cat([left_lse, lses, right_lse]))
    assert_same(out, outs[0].masked_fill((lses[0] == -INF)[..., None], 0.0))
    assert_same(lse, lses[0], "lse")


@pytest.mark.parametrize("shape", [(0, 2, 4), (0, 3, 2, 4), (0, 0, 2, 4), (3, 0, 2, 4)])
def test_no_states_give_the_identity(shape):
    out, lse = merge_states(torch.empty(shape), torch.empty(shape[:-1]))
    assert out.shape == shape[1:] and lse.shape == shape[1:-1]
    assert (out == 0).all() and (lse == -INF).all()


def test_merge_of_many_states():
    rng = torch.Generator().manual_seed(7)
    outs = torch.randn(5000, 2, 3, 8, generator=rng)
    lses = 9 * torch.randn(5000, 2, 3, generator=rng)
    lses[::7] = -INF
    outs[::7] = NAN
    out, lse = merge_states(outs, lses)
    weights = torch.exp(lses.double() - lses.double().amax(0))
    weights = (weights / weights.sum(0))[..., None]
    right = (weights * torch.nan_to_num(outs).double()).sum(0)
    assert_close(out, right)
    assert_close(lse, torch.logsumexp(lses.double(), 0), what="lse")


@pytest.mark.parametrize("lse", [-3.4e38, -60000.0, -200.0, 0.0, 200.0, 60000.0, 3.4e38])
def test_equal_extremes_are_averaged_and_a_far_lighter_state_counts_nothing(lse):
    """A merge without the max overflows or gives 0/0 here."""
    outs = torch.tensor([[[1.0]], [[3.0]]])
    for second, right, total in ((lse, 2.0, lse + math.log(2)), (-INF, 1.0, lse)):
        out, merged = merge_states(outs, torch.tensor([[lse], [second]]))
        assert_close(out, right)
        assert_close(merged, total, what="lse")
    if abs(lse) < 1e5:
        assert_close(merge_states(outs, torch.tensor([[lse], [lse - 104.0]]))[0], 1.0)


def test_sums_are_kept_in_float32_for_half_precision_states():
    """4095 states of 1 and one of 0: a float16 sum of ones stops counting at 2048."""
    outs = torch.ones(4096, 1, 1, dtype=torch.float16)
    outs[-1] = 0.0
    out, lse = merge_states(outs, torch.zeros(4096, 1))
    assert_close(out, 4095 / 4096)
    assert_close(lse, math.log(4096), what="lse")


def test_arguments_are_only_read_and_may_be_strided():
    rng = torch.Generator().manual_seed(5)
    wide_outs = torch.randn(6, 4, 3, 10, generator=rng)
    wide_lses = torch.randn(3, 4, 6, generator=rng)
    outs, lses = wide_outs[::2, :, :, 1:8], wide_lses.transpose(0, 2)[::2]
    before = wide_outs.clone(), wide_lses.clone()
    out, lse = merge_states(outs, lses)
    same, same_lse = merge_states(outs.contiguous(), lses.contiguous())
    assert_same(out, same)
    assert_same(lse, same_lse, "lse")
    assert_same(wide_outs, before[0], "outs")
    assert_same(wide_lses, before[1], "lses")


@in_each_layout
@settings(max_examples=20)
@given(cuts=st.sets(st.integers(0, 41), max_size=5), sharp=st.sampled_from([1.0, 12.0]))
def test_a_sequence_cut_anywhere_merges_to_the_whole(layout, cuts, sharp):
    """Not only at blocks: at any token, into any number of pieces, empty ones too."""
    dense = random([41], 6, 2, 16, seed=41, sharp=sharp)
    how = {"layout": layout, "partition_size": 16, "return_lse": True}
    whole = paged_attention(dense.query, *paged(dense, 8, layout), **how)
    edges = [0, *sorted(cuts), 41]
    parts = []
    for a, b in zip(edges, edges[1:]):
        part = Dense(dense.query, [dense.keys[0][a:b]], [dense.values[0][a:b]])
        parts.append(paged_attention(part.query, *paged(part, 8, layout, seed=a), **how))
    out, lse = merge_states(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    extra = rounding(dense)
    assert_close(out, whole[0].double(), extra=extra)
    assert_close(lse, whole[1].double(), extra=extra, what="lse")


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2, 3, 1)])
def test_states_that_do_not_belong_together_are_refused(shape):
    call = {"outs": torch.zeros(2, 3, 4), "lses": torch.zeros(shape)}
    refused(merge_states, call, "lses", (str(shape), "(2, 3, 4)"))
    refused(merge_states, {"outs": torch.zeros(4), "lses": torch.zeros(())}, "outs", ("(4,)",))


def test_states_of_another_kind_are_refused():
    outs, lses = torch.zeros(1, 3, 4), torch.zeros(1, 3)
    for name, wrong, word in (
        ("outs", outs.int(), "int32"),
        ("outs", [outs], "list"),
        ("lses", lses.long(), "int64"),
        ("lses", [lses], "list"),
        ("lses", lses.to("meta"), "meta"),
    ):
        refused(merge_states, {"outs": outs, "lses": lses, name: wrong}, name, (word,))
