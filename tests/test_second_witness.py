"""The judge is judged: reference_attention against PyTorch's own attention, in float64.

`scaled_dot_product_attention` on the dense keys and values, with the bias and the mask as one
dense `attn_mask` and a sink as one more key; `flex_attention`'s score_mod, which softcap needs.
Neither returns the lse under test, so it is put to the question: one more key, whose logit is the
lse that the reference states, must take exactly half of the weight.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import INF, LAYOUTS, Dense, assert_close, paged, random
from hypothesis import assume, given, note
from hypothesis import strategies as st

from paged_attention import reference_attention

try:
    from torch.nn.attention.flex_attention import flex_attention
except ImportError:  # it came with torch 2.5
    flex_attention = None

FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def dense_bias(tokens, q_len, num_heads, *, slopes=None, window=None, causal=True):
    """(num_heads, q_len, tokens), float64: what is added to a logit, -inf where it isn't seen."""
    position = torch.arange(tokens, dtype=torch.float64)
    own = torch.arange(q_len, dtype=torch.float64)[:, None] + (tokens - q_len)
    distance = position - own  # (q_len, tokens), 0 for a row's own token
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


def sdpa(query, key, value, bias, scale):
    """(num_heads, q_len, head_size), for (num_heads, tokens, head_size) of K and V."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


def flex(query, key, value, bias, scale, softcap):
    """The same, for a logit that is capped before the bias is added."""

    def capped(score, batch, head, row, token):
        return softcap * torch.tanh(score / softcap) + bias[head, row, token]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not compiled: what is wanted here
        return flex_attention(
            query[None], key[None], value[None], score_mod=capped, scale=scale
        ).squeeze(0)


def witnesses(out, lse, attend, query, key, value, bias, sinks):
    """The reference's (q_len, num_heads, head_size) and (q_len, num_heads) are what attend says.

    query: (q_len, num_heads, head_size);  key, value: (tokens, num_kv_heads, head_size), float64
    """
    group = query.shape[1] // key.shape[1]
    query = query.double().transpose(0, 1)  # (num_heads, q_len, head_size)
    key, value = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
    lse = lse.transpose(0, 1)  # (num_heads, q_len)
    if sinks is not None:
        logit = sinks[:, None].expand_as(lse)
        key, value, bias = with_one_more(key, value, bias, logit, 0.0)
    seen = (bias > -INF).any(-1)
    assert torch.equal(lse > -INF, seen)
    right = attend(query, key, value, bias)
    assert_close(out.transpose(0, 1)[seen], right[seen], extra=1e-11)
    assert (out.transpose(0, 1)[~seen] == 0).all()

    halved = with_one_more(key, torch.zeros_like(value), bias, lse, 1.0)
    share = attend(query, *halved)
    assert_close(share[seen], 0.5, dtype=torch.float64, extra=1e-10, what="a key of logit lse")


@st.composite
def batches(draw, softcap):
    """(dense, the reference's arguments, its cache's arguments)."""
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 6, 7]))
    causal, q_len = draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 5]))
    lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    layout, seed = draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 2**31))
    dense = random(lens, num_heads * q_len, num_kv_heads, 16, seed=seed, sharp=4.0)
    dense = dense._replace(query=dense.query.view(len(lens), q_len, num_heads, 16))
    options = {"scale": draw(st.sampled_from([None, 0.7, -0.3])), "causal": causal}
    if causal and draw(st.booleans()):
        options["alibi_slopes"] = torch.linspace(-0.4, 0.9, num_heads)
    if causal and draw(st.booleans()):
        options["window"] = draw(st.integers(1, 45))
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(3.0, -2.0, num_heads)
    if softcap:
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    for name in ("k_scale", "v_scale"):
        options[name] = draw(
            st.sampled_from([1.0, 0.25, torch.tensor([1.5]), torch.linspace(0.5, 2, num_kv_heads)])
        )
    fp8 = draw(st.sampled_from([None, *FP8]))
    note(f"{lens=} {q_len=} heads={num_heads}/{num_kv_heads} {layout=} {fp8=} {options}")
    return dense, options, layout, fp8, draw(st.sampled_from([1, 3, 8, 64]))


def check(batch):
    dense, options, layout, fp8, block_size = batch
    stored, how = dense, {"layout": layout}
    keys, values = dense.keys, dense.values
    if fp8:
        as_float8 = getattr(torch, FP8[fp8])
        keys, values = ([x.clamp(-400, 400).to(as_float8) for x in xs] for xs in (keys, values))
        stored = Dense(dense.query, *([x.view(torch.uint8) for x in xs] for xs in (keys, values)))
        how.update(kv_cache_dtype=fp8)
    poison = (0x7F, 0x7F) if fp8 else (float("nan"),) * 2
    pool = paged(stored, block_size, layout, poison=poison)
    out, lse = reference_attention(dense.query, *pool, **how, **options)
    per_head = {name: _per_kv_head(options[name]) for name in ("k_scale", "v_scale")}
    scale = 16**-0.5 if options["scale"] is None else options["scale"]
    for b, (key, value) in enumerate(zip(keys, values)):
        q_len, num_heads = dense.query.shape[1:3]
        bias = dense_bias(
            len(key),
            q_len,
            num_heads,
            slopes=options.get("alibi_slopes"),
            window=options.get("window"),
            causal=options["causal"],
        )

        def attend(query, key, value, bias):
            if "softcap" in options:
                return flex(query, key, value, bias, scale, options["softcap"])
            return sdpa(query, key, value, bias, scale)

        key, value = key.double() * per_head["k_scale"], value.double() * per_head["v_scale"]
        sinks = options.get("sinks")
        witnesses(out[b], lse[b], attend, dense.query[b], key, value, bias, sinks)


def _per_kv_head(scale):
    return scale.double()[:, None] if isinstance(scale, torch.Tensor) else scale


@given(batch=batches(softcap=False))
def test_the_reference_agrees_with_scaled_dot_product_attention(batch):
    check(batch)


@pytest.mark.skipif(flex_attention is None, reason="FlexAttention came with torch 2.5")
@given(batch=batches(softcap=True))
def test_the_reference_agrees_with_flex_attention_where_logits_are_capped(batch):
    assume(all(len(key) for key in batch[0].keys))  # it takes no empty sequence
    check(batch)
