"""A sequence's bits depend on the sequence: not on its neighbours, their number, or where it lies.

Nor on anything in memory that is not its own. On the CPU bit for bit, on CUDA within 2e-6.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    DTYPES,
    INF,
    NAN,
    Dense,
    Pool,
    assert_close,
    assert_same,
    in_each_layout,
    on_each_device,
    paged,
    random,
    to,
)
from hypothesis import given
from hypothesis import strategies as st

from paged_attention import paged_attention

HEADS, KV_HEADS, SIZE = 6, 2, 16


def one(tokens, seed, dtype=torch.float32):
    """One sequence, the same every time."""
    return random([tokens], HEADS, KV_HEADS, SIZE, seed=seed, sharp=4.0, dtype=dtype)


def together(sequences):
    return Dense(
        torch.cat([s.query for s in sequences]),
        [s.keys[0] for s in sequences],
        [s.values[0] for s in sequences],
    )


def decode(dense, layout, partition_size, block_size=8, device="cpu", **where):
    pool = paged(to(dense, device=device), block_size, layout, device=device, **where)
    return paged_attention(
        dense.query.to(device),
        *pool,
        layout=layout,
        partition_size=partition_size,
        return_lse=True,
    )


def agree(got, right, device="cpu"):
    for name, x, y in zip(("out", "lse"), got, right):
        if device == "cpu":
            assert_same(x, y, name)
        else:
            assert_close(x, y.double(), what=name)


@on_each_device
@in_each_layout
@pytest.mark.parametrize("partition_size", [8, 32, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_neighbours(device, layout, partition_size, dtype):
    """Alone, first, last, in the middle; beside longer, shorter and empty ones."""
    mine = one(75, 1, dtype)
    out, lse = decode(mine, layout, partition_size, device=device)
    for lens, at in (
        ([75], 0),
        ([75, 1], 0),
        ([0, 75], 1),
        ([2000, 75], 1),
        ([75, 2000], 0),
        ([3, 76, 0, 75, 74, 500], 3),
        ([*range(40), 75], 40),
    ):
        batch = together([mine if i == at else one(n, 100 + i, dtype) for i, n in enumerate(lens)])
        got = decode(batch, layout, partition_size, device=device, seed=at + len(lens))
        agree([t[at : at + 1] for t in got], (out, lse), device)


@given(data=st.data())
def test_bits_do_not_depend_on_any_batch(data):
    draw = data.draw
    layout = draw(st.sampled_from(["vllm", "HND", "NHD"]))
    block_size = draw(st.sampled_from([1, 4, 8, 16]))
    partition_size = draw(st.sampled_from([8, 24, 64, None]))
    lens = draw(st.lists(st.integers(0, 90), min_size=1, max_size=6))
    how = {"layout": layout, "partition_size": partition_size, "block_size": block_size}
    sequences = [one(n, 7 + n) for n in lens]
    batch = decode(together(sequences), seed=draw(st.integers(0, 99)), **how)
    for i, mine in enumerate(sequences):
        agree([t[i : i + 1] for t in batch], decode(mine, seed=i, **how))
    order = draw(st.permutations(range(len(lens))))
    again = decode(together([sequences[i] for i in order]), seed=len(lens), **how)
    agree(again, [t[list(order)] for t in batch])


@pytest.mark.quick
@on_each_device
@in_each_layout
def test_bits_do_not_depend_on_where_the_blocks_lie(device, layout):
    """Shuffled, in order, backwards, far apart in a big pool, with wider and narrower tables."""
    mine = one(75, 2)
    right = decode(mine, layout, 32, device=device, tables=[list(range(10))], extra_columns=0)
    for where in (
        {"tables": [list(range(10))[::-1]]},
        {"tables": [list(range(0, 900, 90))], "num_blocks": 1000},
        {"seed": 5, "spare": 0},
        {"seed": 6, "spare": 300},
        {"extra_columns": 50},
        {"index_dtype": torch.int64},
    ):
        agree(decode(mine, layout, 32, device=device, **where), right, device)


@pytest.mark.quick
@on_each_device
@in_each_layout
@pytest.mark.parametrize("partition_size", [8, 64])
def test_what_lies_in_memory_that_is_not_the_sequences_own_is_no_matter(
    device, layout, partition_size
):
    """Tails and unreferenced blocks: zeros, NaN, infinities, the largest numbers."""
    dense = together([one(n, 30 + n) for n in (13, 75, 0, 8)])
    right = decode(dense, layout, partition_size, device=device, poison=(0.0, 0.0))
    for poison in ((NAN, NAN), (INF, -INF), (-INF, INF), (3.4e38, 3.4e38), (1.0, NAN)):
        got = decode(dense, layout, partition_size, device=device, poison=poison)
        agree(got, right)  # the same shapes in the same places: bitwise on every device


@pytest.mark.quick
@in_each_layout
def test_a_neighbours_nan_stays_the_neighbours(layout):
    """A sequence that is broken itself comes out broken, and alone so."""
    mine, theirs = one(40, 3), one(55, 4)
    right = decode(mine, layout, 16)
    for key, value in ((NAN, None), (INF, None), (None, NAN), (None, INF)):
        broken = Dense(theirs.query, [theirs.keys[0].clone()], [theirs.values[0].clone()])
        if key is not None:
            broken.keys[0][20] = key
        if value is not None:
            broken.values[0][41] = value
        got = decode(together([broken, mine, broken]), layout, 16)
        agree([t[1:2] for t in got], right)
        for row in (0, 2):
            assert not torch.isfinite(got[0][row]).all(), "a live NaN or Inf was hidden"


@pytest.mark.quick
@in_each_layout
def test_a_call_leaves_nothing_behind_for_the_next(layout):
    """Long, short, empty, long again: the answers are those of calls that came alone."""
    first = {n: decode(one(n, n), layout, 16) for n in (200, 5, 0, 90)}
    for n in (200, 0, 5, 200, 90, 5):
        agree(decode(one(n, n), layout, 16), first[n])


@pytest.mark.quick
@in_each_layout
def test_inputs_are_as_they_were(layout):
    dense = together([one(n, n) for n in (33, 0, 8)])
    pool = paged(dense, 8, layout)
    copies = Pool(*(t.clone() for t in pool))
    query = dense.query.clone()
    paged_attention(dense.query, *pool, layout=layout, partition_size=16, return_lse=True)
    for name, tensor, copy in zip(Pool._fields, pool, copies):
        assert_same(tensor, copy, name)
    assert_same(dense.query, query, "query")
