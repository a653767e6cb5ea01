"""paged_attention is right for every ragged batch, layout, size and dtype it promises to take.

The judge is a float64 loop over the dense keys and values. The pool is written by formula; what
the pool doesn't use is NaN, and what the tables don't use is an id that must not be followed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    DTYPES,
    INF,
    LAYOUTS,
    NAN,
    Dense,
    Pool,
    assert_close,
    assert_same,
    generated,
    in_each_layout,
    inside,
    lanes_per_chunk,
    on_each_device,
    oracle,
    paged,
    pairwise,
    random,
    rounding,
    to,
    uniform,
)
from hypothesis import given, note
from hypothesis import strategies as st

import paged_attention as package
from paged_attention import paged_attention, reference_attention
from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import count


@dataclass
class Problem:
    dense: Dense
    block_size: int
    layout: str
    partition_size: int | None
    scale: float | None
    seed: int
    index_dtypes: tuple

    def pool(self, device="cpu") -> Pool:
        dense = to(self.dense, device=device)
        how = {"seed": self.seed, "device": device}
        pool = paged(dense, self.block_size, self.layout, dtype=dense.keys[0].dtype, **how)
        tables, lens = self.index_dtypes
        return pool._replace(
            block_tables=pool.block_tables.to(tables), seq_lens=pool.seq_lens.to(lens)
        )

    def how(self):
        return {"layout": self.layout, "partition_size": self.partition_size, "scale": self.scale}


@st.composite
def problems(draw):
    layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(DTYPES))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 6, 7]))
    chunk = lanes_per_chunk(dtype) if layout == "vllm" else 1
    head_size = chunk * draw(st.integers(1, 24 // chunk + 1))
    block_size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31]))
    partition_size = draw(st.sampled_from([1, block_size, 2 * block_size, 7, 24, 1000, None]))
    edge = partition_size or 16
    near = [n + d for n in (0, block_size, min(edge, 90)) for d in (-1, 0, 1)]
    some_length = st.integers(0, 70) | st.sampled_from([n for n in near if n >= 0])
    lens = draw(st.lists(some_length, min_size=1, max_size=5))
    seed = draw(st.integers(0, 2**31))
    sizes, sharp = (
        (num_heads, num_kv_heads, head_size),
        draw(st.sampled_from([0.0, 1.0, 8.0, 40.0])),
    )
    dense = random(lens, *sizes, seed=seed, sharp=sharp, dtype=dtype)
    # In a dtype of its own: a query that is rounded to the caches' dtype on the way shows.
    query = random(lens, *sizes, seed=seed + 1, dtype=draw(st.sampled_from(DTYPES))).query
    index = st.sampled_from([torch.int32, torch.int64])
    problem = Problem(
        dense._replace(query=query),
        block_size,
        layout,
        partition_size,
        scale=draw(st.sampled_from([None, 0.3, 1.0])),
        seed=seed,
        index_dtypes=(draw(index), draw(index)),
    )
    note(f"lens={lens} heads={num_heads}/{num_kv_heads} head_size={head_size} {problem.how()}")
    return problem


@pytest.mark.quick
@on_each_device
@given(problem=problems())
def test_ragged_decode_agrees_with_float64(device, problem):
    """With `out` in float32 nothing is left of the inputs' dtype but their own rounding."""
    query, pool = problem.dense.query.to(device), problem.pool(device)
    right, right_lse = oracle(*problem.dense, problem.scale)
    extra = rounding(problem.dense, problem.scale)
    empty = [b for b, k in enumerate(problem.dense.keys) if k.shape[0] == 0]
    for partition_size in (problem.partition_size, 1, 10_000):
        how = {**problem.how(), "partition_size": partition_size, "return_lse": True}
        out, lse = paged_attention(query, *pool, **how)
        assert out.dtype == query.dtype and lse.dtype == torch.float32
        assert_close(out, right, extra=extra)
        assert_close(lse, right_lse, extra=extra, what="lse")
        assert (out[empty] == 0).all()
        wide = torch.full(query.shape, NAN, device=device)
        assert paged_attention(query, *pool, **how, out=wide)[0].data_ptr() == wide.data_ptr()
        assert_close(wide, right, extra=extra)


@given(problem=problems(), data=st.data(), more=st.integers(0, 5000))
def test_the_way_of_calling_changes_no_bit(problem, data, more):
    """Strided inputs, an `out` with gaps, a bound, checks left out. Inputs are only read."""
    inputs = problem.dense.query, *problem.pool()
    plain, lse = paged_attention(*inputs, **problem.how(), return_lse=True)
    strided = [inside(x, data.draw(st.integers(0, x.dim() - 1))) for x in inputs]
    before = [x.clone() for x in strided]
    longest = max(len(k) for k in problem.dense.keys)
    for extra in ({"max_seq_len": longest + more}, {"validate": False}, {"backend": "eager"}):
        wide = torch.full((*plain.shape[:2], 2, plain.shape[2] + 3), NAN, dtype=plain.dtype)
        out = wide[:, :, 1, 2 : 2 + plain.shape[2]]
        how = {**problem.how(), **extra, "out": out, "return_lse": True}
        assert_same(paged_attention(*strided, **how)[1], lse, "lse")
        assert_same(out, plain)
        assert torch.isnan(wide).sum() == wide.numel() - out.numel(), "wrote outside `out`"
    for tensor, copy in zip(strided, before):
        assert_same(tensor, copy, "an input")


@on_each_device
@pairwise(layout=LAYOUTS, dtype=DTYPES, block_size=[8, 48])
def test_lengths_around_a_partition_boundary(device, row):
    """One token more or less than a whole number of partitions, sharp logits, heads 6/2."""
    layout, dtype, block_size = row.values()
    size = 2 * block_size
    lens = [n * size + d for n in (1, 2, 3) for d in (-1, 0, 1)]
    dense = random(lens, 6, 2, 24, seed=block_size, sharp=6.0, dtype=dtype)
    pool = paged(to(dense, device=device), block_size, layout, device=device)
    how = {"layout": layout, "partition_size": size, "return_lse": True}
    out, lse = paged_attention(dense.query.to(device), *pool, **how)
    right, right_lse = oracle(*dense)
    assert_close(out, right, extra=rounding(dense))
    assert_close(lse, right_lse, extra=rounding(dense), what="lse")


@pytest.mark.quick
@in_each_layout
def test_one_token_that_outweighs_all_others_is_found_wherever_it_is(layout):
    """Every position, over several partitions, in turn holds the only key that matters."""
    tokens, block_size = 23, 4
    for winner in range(tokens):
        query = torch.zeros(1, 2, 16)
        query[..., 3] = 1.0
        key = torch.full((tokens, 1, 16), -1.0)
        key[winner, 0, 3] = 60.0
        value = torch.arange(float(tokens))[:, None, None].repeat(1, 1, 16)
        pool = paged(Dense(query, [key], [value]), block_size, layout, seed=winner)
        out = paged_attention(query, *pool, layout=layout, scale=1.0, partition_size=8)
        assert_close(out, float(winner))


@in_each_layout
def test_a_partition_size_is_rounded_up_to_whole_blocks(layout):
    dense = random([100, 64, 17], 4, 2, 16, sharp=4.0)
    pool = paged(dense, 16, layout)
    for asked, rounded in ((1, 16), (15, 16), (17, 32), (33, 48)):
        got, right = (
            paged_attention(dense.query, *pool, layout=layout, partition_size=p, return_lse=True)
            for p in (asked, rounded)
        )
        assert_same(got[0], right[0])
        assert_same(got[1], right[1], "lse")


@in_each_layout
def test_scale_defaults_to_one_over_the_root_of_head_size(layout):
    dense = random([19], 2, 1, 12, sharp=3.0)
    pool = paged(dense, 4, layout)
    default = paged_attention(dense.query, *pool, layout=layout)
    assert_same(default, paged_attention(dense.query, *pool, layout=layout, scale=12**-0.5))
    for scale in (-0.7, 0.0, 2.5):
        out = paged_attention(dense.query, *pool, layout=layout, scale=scale)
        assert_close(out, oracle(*dense, scale)[0], extra=rounding(dense, scale))


def test_layout_none_means_vllm_and_return_lse_makes_a_pair():
    dense = uniform([4])
    pool = paged(dense, 16, "vllm")
    alone = paged_attention(dense.query, *pool)
    out, lse = paged_attention(dense.query, *pool, layout="vllm", return_lse=True)
    assert isinstance(alone, torch.Tensor)
    assert_same(alone, out)
    assert lse.dtype == torch.float32 and lse.shape == (1, 1)
    assert_close(lse, math.log(4), what="lse")


@in_each_layout
@pytest.mark.parametrize("num_blocks, columns", [(3, 0), (3, 3), (0, 2)])
def test_no_sequences_and_no_tokens(layout, num_blocks, columns):
    pool = paged(random([5], 1, 2, 16), 4, layout, tables=[[0, 1]], num_blocks=3)
    for num_seqs in (0, 3):
        inputs = (
            torch.ones(num_seqs, 4, 16),
            pool.key_cache[:num_blocks],
            pool.value_cache[:num_blocks],
            torch.full((num_seqs, columns), -5, dtype=torch.int32),
            torch.zeros(num_seqs, dtype=torch.int32),
        )
        for partition_size in (4, None):
            how = {"layout": layout, "partition_size": partition_size, "return_lse": True}
            out, lse = paged_attention(*inputs, **how)
            assert out.shape == (num_seqs, 4, 16) and (out == 0).all()
            assert lse.shape == (num_seqs, 4) and (lse == -INF).all()


@in_each_layout
def test_two_sequences_may_share_blocks(layout):
    """A common prefix: both tables name the same blocks, one sequence goes on longer."""
    dense = generated([8, 8], 4, 2, 16, rows=[0, 0])
    pool = paged(dense, 4, layout, tables=[[5, 2], [5, 2]], num_blocks=6)
    lens = torch.tensor([8, 6], dtype=torch.int32)
    out = paged_attention(dense.query, *pool[:3], lens, layout=layout, partition_size=4)
    keys = [dense.keys[0], dense.keys[0][:6]]
    values = [dense.values[0], dense.values[0][:6]]
    assert_close(out, oracle(dense.query, keys, values)[0])


def test_the_import_line_of_the_contract_works():
    names = "paged_attention plan_decode DecodePlan merge_states PagedKVCache OutOfBlocks"
    for name in (*names.split(), "Workspace", "reference_attention"):
        assert hasattr(package, name), name
    assert issubclass(package.OutOfBlocks, Exception)


@pytest.mark.quick
def test_intermediates_are_as_large_as_a_wave_however_long_the_sequence():
    """Beyond a wave, a sequence adds its partitions' states, and nothing that grows faster."""

    def peak(tokens):
        x = random_inputs([tokens], layout="HND", device="meta")
        x = x._replace(block_tables=x.block_tables.to("meta"))
        return count(lambda: paged_attention(*x, layout="HND", validate=False)).peak_bytes

    kv_bytes = 2 * 4 * 256 * 4  # a token's
    assert peak(8192) < 12 * 2**20 and peak(100_000) < 12 * 2**20
    assert peak(800_000) < 12 * 2**20 + 0.003 * kv_bytes * 800_000


@given(data=st.data())
def test_the_reference_agrees_with_float64_on_every_option(data):
    draw = data.draw
    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES))
    num_kv_heads = draw(st.integers(1, 2))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3]))
    lens, q_len = draw(st.lists(st.integers(0, 20), max_size=3)), draw(st.sampled_from([1, 2, 4]))
    seed, causal = draw(st.integers(0, 2**31)), draw(st.booleans())
    dense = random(lens, num_heads * q_len, num_kv_heads, 8, seed=seed, sharp=3.0, dtype=dtype)
    if q_len > 1 or draw(st.booleans()):
        dense = dense._replace(query=dense.query.view(len(lens), q_len, num_heads, 8))
    per_head = torch.linspace(-1.5, 2.0, num_heads)
    options = {"scale": draw(st.sampled_from([None, 1.0, -0.4])), "causal": causal}
    options["softcap"] = draw(st.sampled_from([None, 5.0]))
    options["sinks"] = draw(st.sampled_from([None, per_head]))
    options["window"] = draw(st.none() | st.integers(1, 25)) if causal else None
    slopes = draw(st.sampled_from([None, per_head])) if causal else None
    pool = paged(dense, draw(st.sampled_from([1, 3, 8])), layout, seed=seed)
    k_scale, v_scale = draw(st.sampled_from([(1.0, 1.0), (0.5, 3.0)]))
    how = {"layout": layout, "k_scale": k_scale, "v_scale": v_scale, "alibi_slopes": slopes}
    out, lse = reference_attention(dense.query, *pool, **how, **options)
    keys = [k.double() * k_scale for k in dense.keys]
    values = [v.double() * v_scale for v in dense.values]
    right, right_lse = oracle(dense.query, keys, values, slopes=slopes, **options)
    assert out.dtype == torch.float64 and out.shape == dense.query.shape
    assert_close(out, right, extra=1e-11)
    assert_close(lse, right_lse, dtype=torch.float64, extra=1e-11, what="lse")
