"""paged_attention is right for every ragged batch, layout, size and dtype it promises to take.

The judge is a float64 loop over the dense keys and values; the pool is written by formula; what
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
    lanes_per_chunk,
    on_each_device,
    oracle,
    paged,
    random,
    rounding,
    to,
    uniform,
)
from hypothesis import assume, given, note
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
    query_dtype: torch.dtype

    def pool(self, device="cpu") -> Pool:
        pool = paged(
            to(self.dense, device=device),
            self.block_size,
            self.layout,
            seed=self.seed,
            device=device,
        )
        tables, lens = self.index_dtypes
        return pool._replace(
            block_tables=pool.block_tables.to(tables), seq_lens=pool.seq_lens.to(lens)
        )

    def query(self, device="cpu"):
        return self.dense.query.to(device, self.query_dtype)

    def how(self):
        return {"layout": self.layout, "partition_size": self.partition_size, "scale": self.scale}

    def right(self):
        """(out, lse) and what float32 may add to the tolerance."""
        dense = self.dense._replace(query=self.query())
        return *oracle(*dense, self.scale), rounding(dense, self.scale)


@st.composite
def problems(draw, dtypes=DTYPES, sharp=(0.0, 1.0, 8.0, 40.0)):
    layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(dtypes))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 6, 7]))
    chunk = lanes_per_chunk(dtype) if layout == "vllm" else 1
    head_size = chunk * draw(st.integers(1, 24 // chunk + 1))
    block_size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31]))
    partition_size = draw(st.sampled_from([1, block_size, 2 * block_size, 7, 24, 1000, None]))
    edge = partition_size or 16
    near = [n + d for n in (0, block_size, min(edge, 90)) for d in (-1, 0, 1)]
    some_length = st.integers(0, 70) | st.sampled_from([n for n in near if n >= 0])
    lens = draw(st.lists(some_length, max_size=5))
    seed = draw(st.integers(0, 2**31))
    index = st.sampled_from([torch.int32, torch.int64])
    sharpness = draw(st.sampled_from(sharp))
    dense = random(
        lens, num_heads, num_kv_heads, head_size, seed=seed, sharp=sharpness, dtype=dtype
    )
    # Not yet rounded to any dtype: one that is rounded to the cache's on the way shows.
    query = torch.randn(dense.query.shape, generator=torch.Generator().manual_seed(seed + 1))
    problem = Problem(
        dense=dense._replace(query=query),
        block_size=block_size,
        layout=layout,
        partition_size=partition_size,
        scale=draw(st.sampled_from([None, 0.3, 1.0])),
        seed=seed,
        index_dtypes=(draw(index), draw(index)),
        query_dtype=draw(st.sampled_from(dtypes)),
    )
    note(f"lens={lens} heads={num_heads}/{num_kv_heads} head_size={head_size} {problem.how()}")
    return problem


@pytest.mark.quick
@on_each_device
@given(problem=problems())
def test_ragged_decode_agrees_with_float64(device, problem):
    out, lse = paged_attention(
        problem.query(device), *problem.pool(device), **problem.how(), return_lse=True
    )
    right, right_lse, extra = problem.right()
    assert out.dtype == problem.query_dtype and lse.dtype == torch.float32
    assert out.shape == right.shape and lse.shape == right_lse.shape
    assert_close(out, right, extra=extra)
    assert_close(lse, right_lse, extra=extra, what="lse")
    empty = [b for b, k in enumerate(problem.dense.keys) if k.shape[0] == 0]
    assert (out[empty] == 0).all()


@given(problem=problems(dtypes=(torch.float16, torch.bfloat16)))
def test_half_precision_inputs_are_accumulated_in_float32(problem):
    """With `out` in float32 nothing is left of the inputs' dtype but their own rounding."""
    out = torch.full(problem.dense.query.shape, NAN)
    given_back = paged_attention(problem.query(), *problem.pool(), **problem.how(), out=out)
    assert given_back is out or given_back.data_ptr() == out.data_ptr()
    right, _, extra = problem.right()
    assert_close(out, right, extra=extra)


@given(problem=problems(), strided=st.booleans())
def test_out_is_filled_whatever_it_held_and_however_it_is_strided(problem, strided):
    shape, dtype = problem.dense.query.shape, problem.query_dtype
    plain = paged_attention(problem.query(), *problem.pool(), **problem.how())
    if strided:
        wide = torch.full((shape[0], shape[1], 2, shape[2] + 3), NAN, dtype=dtype)
        out = wide[:, :, 1, 2 : 2 + shape[2]]
    else:
        out = torch.full(shape, NAN, dtype=dtype)
    answer = paged_attention(problem.query(), *problem.pool(), **problem.how(), out=out)
    assert answer.data_ptr() == out.data_ptr()
    assert_same(out, plain)
    if strided:
        assert torch.isnan(wide).sum() == wide.numel() - out.numel(), "wrote outside `out`"


@given(problem=problems(), data=st.data())
def test_strided_inputs_give_the_same_bits(problem, data):
    pool, query = problem.pool(), problem.query()
    plain = paged_attention(query, *pool, **problem.how())

    def inside(tensor):
        """The same values, as every second element of a dimension of something poisoned."""
        dim = data.draw(st.integers(0, tensor.dim() - 1))
        shape = list(tensor.shape)
        shape[dim] = 2 * shape[dim] + 1
        fill = NAN if tensor.is_floating_point() else -9
        wide = torch.full(shape, fill, dtype=tensor.dtype)
        view = wide[(slice(None),) * dim + (slice(1, None, 2),)]
        view.copy_(tensor)
        return view

    out = paged_attention(inside(query), *(inside(t) for t in pool), **problem.how())
    assert_same(out, plain)


@given(problem=problems(), more=st.integers(0, 5000))
def test_max_seq_len_and_validate_change_no_bit(problem, more):
    pool = problem.pool()
    plain = paged_attention(problem.query(), *pool, **problem.how(), return_lse=True)
    longest = max((k.shape[0] for k in problem.dense.keys), default=0)
    for extra in ({"max_seq_len": longest + more}, {"validate": False}, {"backend": "eager"}):
        again = paged_attention(problem.query(), *pool, **problem.how(), **extra, return_lse=True)
        assert_same(again[0], plain[0])
        assert_same(again[1], plain[1], "lse")


@given(problem=problems())
def test_inputs_are_only_read(problem):
    inputs = (problem.query(), *problem.pool())
    before = [t.clone() for t in inputs]
    paged_attention(*inputs, **problem.how(), return_lse=True)
    for tensor, copy in zip(inputs, before):
        assert_same(tensor, copy, "an input")


@given(problem=problems(dtypes=(torch.float32,)))
def test_every_layout_and_partition_size_gives_the_same_answer(problem):
    assume(problem.dense.query.shape[-1] % 4 == 0)
    right, right_lse, extra = problem.right()
    for layout in LAYOUTS:
        problem.layout = layout
        for partition_size in (1, problem.block_size * 3, 10_000, None):
            problem.partition_size = partition_size
            out, lse = paged_attention(
                problem.query(), *problem.pool(), **problem.how(), return_lse=True
            )
            assert_close(out, right, extra=extra)
            assert_close(lse, right_lse, extra=extra, what="lse")


@on_each_device
@in_each_layout
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 48])
def test_lengths_around_a_partition_boundary(device, layout, dtype, block_size):
    """One token more or less than a whole number of partitions, sharp logits, heads 6/2."""
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
@pytest.mark.parametrize("group, num_kv_heads", [(6, 4), (1, 5), (7, 1), (7, 4), (3, 3)])
def test_grouped_heads(layout, group, num_kv_heads):
    dense = random([37, 5], group * num_kv_heads, num_kv_heads, 20, seed=group, sharp=5.0)
    pool = paged(dense, 4, layout)
    for partition_size in (8, 64):
        out = paged_attention(dense.query, *pool, layout=layout, partition_size=partition_size)
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))


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


def test_layout_none_means_vllm_for_a_key_of_five_dimensions():
    dense = random([19], 2, 1, 12, sharp=3.0)
    pool = paged(dense, 4, "vllm")
    assert_same(
        paged_attention(dense.query, *pool), paged_attention(dense.query, *pool, layout="vllm")
    )


def test_return_lse_decides_between_a_tensor_and_a_pair():
    dense = uniform([4])
    pool = paged(dense, 16, "HND")
    alone = paged_attention(dense.query, *pool, layout="HND")
    out, lse = paged_attention(dense.query, *pool, layout="HND", return_lse=True)
    assert isinstance(alone, torch.Tensor)
    assert_same(alone, out)
    assert lse.dtype == torch.float32 and lse.shape == (1, 1)
    assert_close(lse, math.log(4), what="lse")


@in_each_layout
@pytest.mark.parametrize("columns", [0, 3])
def test_no_sequences_and_no_tokens(layout, columns):
    key, value = paged(random([5], 1, 2, 16), 4, layout)[:2]
    for num_seqs in (0, 3):
        query = torch.ones(num_seqs, 4, 16)
        tables = torch.full((num_seqs, columns), -5, dtype=torch.int32)
        lens = torch.zeros(num_seqs, dtype=torch.int32)
        for partition_size in (4, None):
            out, lse = paged_attention(
                query,
                key,
                value,
                tables,
                lens,
                layout=layout,
                partition_size=partition_size,
                return_lse=True,
            )
            assert out.shape == (num_seqs, 4, 16) and (out == 0).all()
            assert lse.shape == (num_seqs, 4) and (lse == -INF).all()


@in_each_layout
def test_a_pool_without_blocks_serves_empty_sequences(layout):
    dense = random([0, 0], 2, 1, 16)
    pool = paged(dense, 4, layout, spare=0)
    out, lse = paged_attention(dense.query, *pool, layout=layout, return_lse=True)
    assert (out == 0).all() and (lse == -INF).all()


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


@in_each_layout
def test_no_grad_is_needed_and_none_is_recorded(layout):
    dense = random([9], 2, 1, 16)
    pool = paged(dense, 4, layout)
    query = dense.query.clone().requires_grad_(False)
    with torch.inference_mode():
        inside = paged_attention(query, *pool, layout=layout)
    assert_same(inside.clone(), paged_attention(query, *pool, layout=layout))


def test_the_import_line_of_the_contract_works():
    for name in (
        "paged_attention",
        "plan_decode",
        "DecodePlan",
        "merge_states",
        "PagedKVCache",
        "OutOfBlocks",
        "Workspace",
        "reference_attention",
    ):
        assert hasattr(package, name), name
    assert issubclass(package.OutOfBlocks, Exception)


# -- the reference, which has every option already


@given(data=st.data())
def test_the_reference_agrees_with_float64_on_every_option(data):
    draw = data.draw
    layout = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(DTYPES))
    num_kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * group
    q_len = draw(st.sampled_from([None, 1, 2, 4]))
    lens = draw(st.lists(st.integers(0, 20), max_size=3))
    causal = draw(st.booleans())
    seed = draw(st.integers(0, 2**31))
    dense = random(lens, num_heads, num_kv_heads, 8, seed=seed, sharp=3.0, dtype=dtype)
    if q_len is not None:
        rng = torch.Generator().manual_seed(seed)
        query = torch.randn(len(lens), q_len, num_heads, 8, generator=rng).to(dtype)
        dense = dense._replace(query=query)

    def per_head(name):
        value = torch.linspace(-1.5, 2.0, num_heads) if num_heads > 1 else torch.tensor([0.7])
        return {name: value} if draw(st.booleans()) else {}

    options = {"scale": draw(st.sampled_from([None, 1.0, -0.4]))}
    options.update({"softcap": 5.0} if draw(st.booleans()) else {})
    sinks, slopes = per_head("sinks"), {}
    if causal:
        slopes = per_head("alibi_slopes")
        options.update({"window": draw(st.integers(1, 25))} if draw(st.booleans()) else {})
    else:
        options["causal"] = False
    pool = paged(dense, draw(st.sampled_from([1, 3, 8])), layout, seed=seed)
    k_scale, v_scale = draw(st.sampled_from([(1.0, 1.0), (0.5, 3.0)]))
    out, lse = reference_attention(
        dense.query,
        *pool,
        layout=layout,
        k_scale=k_scale,
        v_scale=v_scale,
        **options,
        **sinks,
        **slopes,
    )
    right, right_lse = oracle(
        dense.query,
        [k.double() * k_scale for k in dense.keys],
        [v.double() * v_scale for v in dense.values],
        slopes=slopes.get("alibi_slopes"),
        **sinks,
        **options,
    )
    assert out.dtype == torch.float64 and out.shape == dense.query.shape
    assert_close(out, right, extra=1e-11)
    assert_close(lse, right_lse, dtype=torch.float64, extra=1e-11, what="lse")


@given(problem=problems())
def test_the_reference_agrees_with_float64_on_ragged_batches(problem):
    out, lse = reference_attention(
        problem.query(), *problem.pool(), layout=problem.layout, scale=problem.scale
    )
    right, right_lse, _ = problem.right()
    assert_close(out, right, extra=1e-10)
    assert_close(lse, right_lse, dtype=torch.float64, extra=1e-10, what="lse")


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
