"""paged_attention is right for every ragged batch, layout, size and dtype it promises to take.

The judge is a float64 loop over the dense keys and values. The pool is written by formula; what
the pool doesn't use is NaN, and what the tables don't use is an id that must not be followed.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    DTYPES,
    assert_close,
    assert_same,
    in_each_layout,
    on_each_device,
    oracle,
    pairwise,
    rounding,
)
from hypothesis import given
from hypothesis import strategies as st
from pools import INF, LAYOUTS, NAN, Dense, generated, inside, paged, random, to, uniform
from problems import problems

import paged_attention as package
from paged_attention import paged_attention
from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import count


@pytest.mark.quick
@on_each_device
@pairwise(layout=LAYOUTS, dtype=DTYPES, block_size=[3, 8, 48], heads=[(6, 2), (7, 1), (5, 5)])
def test_ragged_decode_agrees_with_float64(device, row):
    """No tokens, one, and one more or less than whole partitions; sharp logits. With `out` in
    float32 nothing is left of the inputs' dtype but their own rounding."""
    layout, dtype, block_size, heads = row.values()
    size = 2 * block_size
    lens = [0, 1, *(n * size + d for n in (1, 2, 3) for d in (-1, 0, 1))]
    dense = random(lens, *heads, 24, seed=block_size, sharp=6.0, dtype=dtype)
    query = dense.query.to(device)
    pool = paged(to(dense, device=device), block_size, layout, device=device)
    right, right_lse = oracle(*dense)
    for partition_size in (size, 1, 10_000):
        how = {"layout": layout, "partition_size": partition_size, "return_lse": True}
        wide = torch.full(query.shape, NAN, device=device)
        for out in (None, wide):
            out, lse = paged_attention(query, *pool, **how, out=out)
            assert_close(out, right, extra=rounding(dense))
            assert_close(lse, right_lse, extra=rounding(dense), what="lse")
            assert (out[0] == 0).all()
        assert out.data_ptr() == wide.data_ptr()


@pytest.mark.quick
@in_each_layout
@given(data=st.data(), more=st.integers(0, 5000))
def test_the_way_of_calling_changes_no_bit(layout, data, more):
    """Strided inputs, an `out` with gaps, a bound, checks left out. Inputs are only read."""
    problem = data.draw(problems(layout, data.draw(st.sampled_from(["float32", "half"]))))
    options = {**problem.options, "partition_size": problem.partition_size}
    how = {**options, "layout": layout, "window": problem.window, "return_lse": True}
    inputs = [x.contiguous() for x in problem.inputs]
    plain, lse = paged_attention(*inputs, **how)
    strided = [inside(x, data.draw(st.integers(0, x.dim() - 1))) for x in inputs]
    before = [x.clone() for x in strided]
    for extra in ({"max_seq_len": problem.max_seq_len + more}, {"validate": False}, {}):
        wide = torch.full((*plain.shape[:-1], 2, plain.shape[-1] + 3), NAN, dtype=plain.dtype)
        out = wide[..., 1, 2 : 2 + plain.shape[-1]]
        assert_same(paged_attention(*strided, **how, **extra, out=out)[1], lse, "lse")
        assert_same(out, plain)
        assert torch.isnan(wide).sum() == wide.numel() - out.numel(), "wrote outside `out`"
    for tensor, copy in zip(strided, before):
        assert_same(tensor, copy, "an input")


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
