"""Random decode steps with everything at once, for the differential test.

Only sizes, choices and a seed are drawn by hypothesis, so that a failure shrinks to few of them;
the numbers come from torch. Whatever no row sees is NaN, or an id that nobody may follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from helpers import DTYPES
from hypothesis import strategies as st
from pools import FP8_NAN, GARBAGE, INF, NAN, Dense, inside, lanes_per_chunk, paged, random

FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass
class Problem:
    """One step: the arguments of `paged_attention` but for `out`, and how to judge its answer."""

    inputs: tuple  # query, key_cache, value_cache, block_tables, seq_lens
    layout: str
    options: dict  # what `DecodePlan.run` takes, too
    window: int | None
    partition_size: int | None
    max_seq_len: int  # a capacity plan's capacity
    checks: dict  # what of `paged_attention` changes no answer
    out_dtype: torch.dtype
    out_strided: bool
    dense: Dense  # what the caches hold, by value; hidden tokens may be NaN
    values: list  # each sequence's largest value
    logits: list  # each sequence's largest logit, as a sum of absolute terms
    notes: dict = field(default_factory=dict)


@st.composite
def problems(draw, layout, kind):
    """kind: "float32", "half", or "fp8": what the caches hold."""
    formats = {
        "float32": [(torch.float32, "auto")],
        "half": [(torch.float16, "auto"), (torch.bfloat16, "auto")],
        "fp8": [(torch.uint8, name) for name in ("fp8", *FP8)]
        + [(getattr(torch, dtype), "auto") for dtype in FP8.values()],
    }
    dtype, kv_cache_dtype = draw(st.sampled_from(formats[kind]))
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 16))
    num_heads = num_kv_heads * group
    lanes = lanes_per_chunk(dtype) if layout == "vllm" else 1
    head_size = lanes * draw(st.integers(1, 64 // lanes) | st.sampled_from([1, 96 // lanes]))
    if num_heads < 9 and draw(st.booleans()):
        head_size = lanes * draw(st.integers(1, 576 // lanes))
    block_size = draw(st.integers(1, 32) | st.sampled_from([1, 16, 64, 100, 256]))
    partition_size = draw(st.none() | st.integers(1, 4 * block_size))
    rounded = -(-(partition_size or 64) // block_size) * block_size
    edges = [n * size for n in (0, 1, 2, 3) for size in (block_size, rounded)]
    near = sorted({e + d for e in edges for d in (-1, 0, 1) if 0 <= e + d <= 300})
    q_len = draw(st.integers(1, 5))
    length = st.sampled_from(near) | st.integers(0, 80)
    lens = draw(st.lists(length, min_size=0 if q_len == 1 else 1, max_size=4))
    if not lens:
        num_heads, num_kv_heads = group, 1  # as `paged` makes a pool of nobody
    seed, sharp = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 1.0, 4.0]))

    options, window = _options(draw, num_heads, num_kv_heads, max(lens, default=0) + 3, q_len)
    options["kv_cache_dtype"] = kv_cache_dtype
    query, keys, values = random(lens, num_heads * q_len, num_kv_heads, head_size, seed=seed)
    shape = (len(lens), q_len, num_heads, head_size)
    query = query.view(shape) if q_len > 1 or draw(st.booleans()) else query
    query = query.to(draw(st.sampled_from(DTYPES)))
    keys = [k * sharp for k in keys]
    stored, dense = _stored(query, keys, values, dtype, kv_cache_dtype)
    held = torch.uint8 if dtype.itemsize == 1 else dtype
    pool = _hidden_from_all(draw, stored, held, window, q_len, block_size, layout, seed)
    strided = [draw(st.integers(-1, t.dim() - 1)) for t in (query, *pool)]
    inputs = tuple(inside(t, dim) for t, dim in zip((query, *pool), strided))
    if dtype.itemsize == 1 and kv_cache_dtype == "auto":  # torch 2.1 can but view them as float8
        inputs = inputs[0], *(c.view(dtype) for c in inputs[1:3]), *inputs[3:]
    most = max(lens, default=0) + draw(st.integers(0, 100))
    values_scale = torch.as_tensor(options["v_scale"]).abs().max().item()
    return Problem(
        inputs,
        layout,
        options,
        window,
        partition_size,
        max_seq_len=most,
        checks=draw(st.sampled_from([{}, {"max_seq_len": most}, {"validate": False}])),
        out_dtype=draw(st.sampled_from(sorted({query.dtype, torch.float32}, key=str))),
        out_strided=draw(st.booleans()),
        dense=dense,
        values=[_largest(v).max().item() * values_scale if len(v) else 0.0 for v in dense.values],
        logits=_largest_logits(dense, options),
        notes={
            "lens": lens,
            "query": (tuple(query.shape), query.dtype),
            "caches": (tuple(inputs[1].shape), dtype, layout),
            "partition_size": partition_size,
            "max_seq_len": most,
            "window": window,
            "strided": strided,
            "sharp": sharp,
            "seed": seed,
            **options,
        },
    )


def _options(draw, num_heads, num_kv_heads, longest, q_len):
    """(what a plan's run takes, window)"""
    per_head = st.sampled_from([torch.float32, torch.float16])
    options = {
        "scale": draw(st.none() | st.sampled_from([1.0, 0.2, -0.3])),
        "softcap": draw(st.none() | st.sampled_from([0.7, 5.0, 50.0])),
        "causal": draw(st.booleans()) if q_len > 1 else True,
        "alibi_slopes": None,
        "sinks": None,
    }
    window = None
    if options["causal"]:
        window = draw(st.none() | st.integers(1, longest))
        if draw(st.booleans()):
            steep = draw(st.sampled_from([0.05, 1.0, -0.3]))
            options["alibi_slopes"] = torch.linspace(0.2 * steep, steep, num_heads).to(
                draw(per_head)
            )
    if draw(st.booleans()):
        sinks = torch.linspace(draw(st.sampled_from([-3.0, 20.0])), 4.0, num_heads)
        sinks[draw(st.integers(0, num_heads - 1))] = draw(st.sampled_from([-INF, 0.0]))
        options["sinks"] = sinks.to(draw(per_head))
    kv_heads = torch.linspace(0.5, 2.0, num_kv_heads)
    forms = [1.0, 0.25, torch.tensor(1.5), torch.tensor([0.75]), kv_heads, kv_heads.half()]
    options["k_scale"], options["v_scale"] = (draw(st.sampled_from(forms)) for _ in range(2))
    return options, window


def _stored(query, keys, values, dtype, kv_cache_dtype):
    """(what the caches hold, fp8 as bytes; the same by value)"""
    if dtype.itemsize > 1:
        dense = Dense(query, *([x.to(dtype) for x in xs] for xs in (keys, values)))
        return dense, dense
    names = {"fp8": "float8_e4m3fn", **FP8}
    float8 = dtype if kv_cache_dtype == "auto" else getattr(torch, names[kv_cache_dtype])
    keys, values = ([x.clamp(-448, 448).to(float8) for x in xs] for xs in (keys, values))
    as_bytes = Dense(query, *([x.view(torch.uint8) for x in xs] for xs in (keys, values)))
    return as_bytes, Dense(query, *([x.float() for x in xs] for xs in (keys, values)))


def _hidden_from_all(draw, stored, dtype, window, q_len, block_size, layout, seed):
    """A pool where what no row sees is NaN, and its ids are nobody's."""
    nan = FP8_NAN if dtype == torch.uint8 else NAN
    firsts = [max(0, len(k) - q_len - (window or len(k)) + 1) for k in stored.keys]
    for first, key, value in zip(firsts, stored.keys, stored.values):
        key[:first] = value[:first] = nan
    pool = paged(
        stored,
        block_size,
        layout,
        dtype=dtype,
        seed=seed,
        poison=(nan, nan),
        spare=draw(st.integers(0, 3)),
        extra_columns=draw(st.integers(0, 3)),
    )
    for seq, first in enumerate(firsts):
        for column in range(first // block_size):
            pool.block_tables[seq, column] = GARBAGE[column % len(GARBAGE)]
    ints = st.sampled_from([torch.int32, torch.int64])
    return pool._replace(
        block_tables=pool.block_tables.to(draw(ints)), seq_lens=pool.seq_lens.to(draw(ints))
    )


def _largest_logits(dense, options):
    """For each sequence the largest sum of absolute terms that a logit, its bias included, is."""
    query = dense.query if dense.query.dim() == 4 else dense.query.unsqueeze(1)
    head_size = query.shape[-1]
    scale = head_size**-0.5 if options["scale"] is None else abs(options["scale"])
    scale *= torch.as_tensor(options["k_scale"]).abs().max().item()
    slopes = options["alibi_slopes"]
    steepest = 0.0 if slopes is None else slopes.abs().max().item()
    largest = []
    for rows, key in zip(query, dense.keys):
        terms = _largest(rows) * _largest(key) if len(key) else torch.zeros(head_size)
        largest.append(terms.sum().item() * scale + steepest * len(key))
    return largest


def _largest(tensor):
    """Of each lane, what is hidden left out: (.., .., lanes) -> (lanes,)"""
    return tensor.float().abs().nan_to_num().amax((0, 1))
