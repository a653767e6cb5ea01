"""merge_attn_states makes one state of a prefix's and the rest's."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import DTYPES, assert_close, assert_same, oracle, rounding
from pools import INF, NAN, random

from paged_attention.vllm.states import merge_attn_states


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_and_the_rest_merge_into_the_whole(dtype):
    whole = random([50, 9, 30], 4, 2, 32, sharp=3.0)
    split = [20, 0, 30]  # the second has no prefix, the third nothing else
    parts = []
    for first in (True, False):
        cut = [slice(None, n) if first else slice(n, None) for n in split]
        keys = [k[c] for k, c in zip(whole.keys, cut)]
        out, lse = oracle(whole.query, keys, [v[c] for v, c in zip(whole.values, cut)])
        parts.append((out.to(dtype), lse.float().t().contiguous()))
    (prefix, prefix_lse), (suffix, suffix_lse) = parts
    prefix[1], prefix_lse[:, 1] = NAN, INF  # nothing there: as FlashAttention says it
    suffix[2], suffix_lse[:, 2] = NAN, -INF
    want, want_lse = oracle(*whole)
    out, lse = torch.full_like(prefix, NAN), torch.full_like(prefix_lse, NAN)
    merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert_close(out, want, extra=rounding(whole) + 1e-6 + (dtype != torch.float32) * 0.01)
    assert_close(lse, want_lse.t(), extra=rounding(whole))
    assert prefix_lse[0, 1] == INF  # inputs stay as they are

    alone = torch.full_like(out, NAN)
    merge_attn_states(alone, prefix, prefix_lse, suffix, suffix_lse)
    assert_same(alone, out)


@pytest.mark.parametrize("nothing", [INF, -INF])
def test_two_states_of_nothing_are_nothing(nothing):
    out, lse = torch.full((3, 2, 8), NAN), torch.full((2, 3), NAN)
    state = torch.full((3, 2, 8), NAN), torch.full((2, 3), nothing)
    merge_attn_states(out, *state, *state, output_lse=lse)
    assert out.eq(0).all() and lse.eq(-INF).all()


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"prefix_lse": torch.zeros(3, 2)}, r"prefix_lse must be \(2, 3\)"),
        ({"suffix_output": torch.zeros(3, 2, 4)}, "suffix_output must be"),
        ({"output": torch.zeros(6, 8)}, "output must be .num_tokens, num_heads, head_size"),
        ({"output_lse": 3}, "output_lse must be a tensor"),
        ({"suffix_lse": None}, "suffix_lse must be a tensor"),
    ],
)
def test_a_wrong_state_is_an_error_by_name(changed, words):
    given = {
        "output": torch.zeros(3, 2, 8),
        "prefix_output": torch.zeros(3, 2, 8),
        "prefix_lse": torch.zeros(2, 3),
        "suffix_output": torch.zeros(3, 2, 8),
        "suffix_lse": torch.zeros(2, 3),
        "output_lse": None,
    }
    assert list(inspect.signature(merge_attn_states).parameters) == list(given)
    with pytest.raises((TypeError, ValueError), match=words):
        merge_attn_states(*(given | changed).values())
