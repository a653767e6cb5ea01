"""An option that asks for nothing costs nothing: the same ATen ops run as in the plain call."""

from __future__ import annotations

import pytest
import torch
from helpers import in_each_layout

from paged_attention import Workspace, paged_attention, plan_decode
from paged_attention.inputs import random_inputs
from paged_attention.measure import count

pytestmark = pytest.mark.quick

SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": 8}
BATCHES = {
    "one tile": ([75], torch.float32),
    "ragged": ([75, 0, 3, 200], torch.float16),
    "several waves": ([30_000, 300], torch.float32),
}
NOTHING = {
    "the default scale": {"scale": 16**-0.5},
    "cache scales of 1": {"k_scale": 1.0, "v_scale": 1},
    "None": dict.fromkeys(["scale", "alibi_slopes", "softcap", "sinks"]),
    "causal, one query token": {"causal": True, "kv_cache_dtype": "auto"},
    "a window that no sequence fills": {"window": 40_000},
}
OF_THE_CALL_ALONE = {
    "a bound": {"max_seq_len": 40_000},
    "a bound for lengths on the host, unchecked": {"max_seq_len": 40_000, "validate": False},
    "the default backend": {"backend": "eager"},
}


def ops_of_a_call(inputs, layout, **option):
    return count(lambda: paged_attention(*inputs, layout=layout, **option)).by_op


def ops_of_a_run(inputs, layout, lengths, window=None, **option):
    plan = plan_decode(
        **SIZES, layout=layout, dtype=inputs.key_cache.dtype, window=window, **lengths
    )
    how = {"out": torch.empty_like(inputs.query), "workspace": Workspace(), **option}
    return count(lambda: plan.run(*inputs, **how)).by_op


@in_each_layout
@pytest.mark.parametrize("batch", BATCHES)
def test_an_option_that_asks_for_nothing_costs_nothing(batch, layout):
    lens, dtype = BATCHES[batch]
    inputs = random_inputs(lens, **SIZES, layout=layout, dtype=dtype)
    plain = {
        validate: ops_of_a_call(inputs, layout, validate=validate) for validate in (True, False)
    }
    for name, option in {**NOTHING, **OF_THE_CALL_ALONE}.items():
        right = plain[option.get("validate", True)]
        assert ops_of_a_call(inputs, layout, **option) == right, name
    for lengths in ({"seq_lens": lens}, {"num_seqs": len(lens), "max_seq_len": max(lens)}):
        right = ops_of_a_run(inputs, layout, lengths)
        for name, option in NOTHING.items():
            assert ops_of_a_run(inputs, layout, lengths, **option) == right, (name, lengths)


@in_each_layout
def test_a_number_for_a_scale_costs_one_operation_at_most(layout):
    """k_scale is multiplied into the scale of the logits, v_scale into the result."""
    inputs = random_inputs([75, 200], **SIZES, layout=layout)
    plain = ops_of_a_call(inputs, layout)
    assert ops_of_a_call(inputs, layout, scale=0.5, k_scale=0.25) == plain
    assert sum(ops_of_a_call(inputs, layout, v_scale=2.0).values()) == sum(plain.values()) + 1
