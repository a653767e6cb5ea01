"""The judge is judged: `reference_attention` against three witnesses that share nothing with it.

`reference_attention` takes what the kernel takes, so it can judge every call. But both might
misread a table, or the definition, in the same way. The witnesses work on dense keys and values
instead, in float64:

* `oracle`, of helpers.py, is the definition: one head and one query token at a time, in a loop;
* `scaled_dot_product_attention`, the bias and the mask as one dense `attn_mask`, a sink as one
  more key, is PyTorch's own reading of it;
* `flex_attention`'s score_mod is PyTorch's only attention that can cap a logit before the mask.

PyTorch's two don't return the lse, so it is put to the question: one more key, whose logit is the
lse that the reference states, must take exactly half of the weight.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, oracle
from hypothesis import assume, given, note
from hypothesis import strategies as st
from pools import INF, LAYOUTS, Dense
from problems import problems

from paged_attention import reference_attention

try:
    from torch.nn.attention.flex_attention import flex_attention
except ImportError:  # it came with torch 2.5
    flex_attention = None

any_problem = st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(["float32", "half", "fp8"]))
any_problem = any_problem.flatmap(lambda how: problems(*how))


def witnessed(problem):
    """(dense (query of four dimensions), the reference's out and lse of that shape)"""
    note(repr(problem.notes))
    out, lse = reference_attention(
        *problem.inputs, layout=problem.layout, window=problem.window, **problem.options
    )
    assert out.dtype == torch.float64 and out.shape == problem.inputs[0].shape

    def scaled(tensors, scale):
        scale = torch.as_tensor(scale, dtype=torch.float64)
        scale = scale[:, None] if scale.numel() > 1 else scale
        return [x.double().nan_to_num() * scale for x in tensors]  # what is hidden is NaN

    query, keys, values = problem.dense
    keys = scaled(keys, problem.options["k_scale"])
    values = scaled(values, problem.options["v_scale"])
    if query.dim() == 3:
        query, out, lse = (x.unsqueeze(1) for x in (query, out, lse))
    return Dense(query, keys, values), out, lse


@given(problem=any_problem)
def test_the_reference_agrees_with_the_definition(problem):
    dense, out, lse = witnessed(problem)
    names = ("scale", "softcap", "sinks", "causal")
    options = {name: problem.options[name] for name in names} | {"window": problem.window}
    right, right_lse = oracle(*dense, slopes=problem.options["alibi_slopes"], **options)
    assert_close(out, right, extra=1e-11)
    assert_close(lse, right_lse, dtype=torch.float64, extra=1e-11, what="lse")


def dense_bias(tokens, q_len, num_heads, slopes, window, causal):
    """(num_heads, q_len, tokens), float64: what is added to a logit, -inf where it isn't seen."""
    position = torch.arange(tokens, dtype=torch.float64)
    own = torch.arange(q_len, dtype=torch.float64)[:, None] + (tokens - q_len)
    distance = position - own  # (q_len, tokens), 0 for a query token's own
    bias = torch.zeros(num_heads, q_len, tokens, dtype=torch.float64)
    if slopes is not None:
        bias += slopes.double()[:, None, None] * distance
    if causal:
        bias.masked_fill_(distance > 0, -INF)
    if window is not None:
        bias.masked_fill_(distance <= -window, -INF)
    return bias


def with_one_more(key, value, bias, logit, payload):
    """A key of zeros whose logit is all bias: (num_heads, q_len), and what its value holds."""
    key = F.pad(key, (0, 0, 0, 1))
    value = F.pad(value, (0, 0, 0, 1), value=payload)
    return key, value, torch.cat([bias, logit.double()[..., None]], dim=-1)


def flex(query, key, value, bias, scale, softcap):
    """Attention of a logit that is capped before the bias is added."""

    def capped(score, batch, head, row, token):
        return softcap * torch.tanh(score / softcap) + bias[head, row, token]

    tensors = (x.unsqueeze(0) for x in (query, key, value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not compiled: what is wanted here
        return flex_attention(*tensors, score_mod=capped, scale=scale).squeeze(0)


def agrees(problem, attend):
    """attend(query, key, value, bias, scale): PyTorch's attention of (num_heads, ...) tensors."""
    dense, outs, lses = witnessed(problem)
    options, (q_len, num_heads, head_size) = problem.options, dense.query.shape[1:]
    scale = head_size**-0.5 if options["scale"] is None else options["scale"]
    how = options["alibi_slopes"], problem.window, options["causal"]
    for query, key, value, out, lse in zip(*dense, outs, lses):
        key, value = (
            x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0) for x in (key, value)
        )
        query, out, lse = (x.transpose(0, 1) for x in (query.double(), out, lse))
        bias = dense_bias(key.shape[1], q_len, num_heads, *how)
        if options["sinks"] is not None:
            sinks = options["sinks"][:, None].expand_as(lse)
            key, value, bias = with_one_more(key, value, bias, sinks, 0.0)
        seen = (bias > -INF).any(-1)
        assert torch.equal(lse > -INF, seen)
        assert (out[~seen] == 0).all()
        right = attend(query, key, value, bias, scale)
        assert_close(out[seen], right[seen], extra=1e-11)
        halved = with_one_more(key, torch.zeros_like(value), bias, lse, 1.0)
        share = attend(query, *halved, scale)
        assert_close(share[seen], 0.5, dtype=torch.float64, extra=1e-10, what="a key of logit lse")


@given(problem=any_problem)
def test_the_reference_agrees_with_scaled_dot_product_attention(problem):
    problem.options["softcap"] = None

    def sdpa(query, key, value, bias, scale):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)

    agrees(problem, sdpa)


@pytest.mark.skipif(flex_attention is None, reason="FlexAttention came with torch 2.5")
@given(problem=any_problem)
def test_the_reference_agrees_with_flex_attention_where_logits_are_capped(problem):
    assume(problem.dense.keys and all(map(len, problem.dense.keys)))  # it takes none that is empty
    cap = problem.options["softcap"] = problem.options["softcap"] or 3.0
    agrees(problem, lambda *call: flex(*call, softcap=cap))
