"""What is done to a logit, and in what order: bias, window, cap, sink, several query tokens."""

from __future__ import annotations

import math

import torch
from helpers import oracle, rounding
from pools import GARBAGE, INF, NAN, Dense, random, uniform

from .judging import case, each_dtype


def agrees(row, dense, block_size, *, scale=0.25, alibi_slopes=None, **options):
    """All of a path's answers are the oracle's."""
    right = oracle(*dense, scale, slopes=alibi_slopes, **options)
    options.update(scale=scale, alibi_slopes=alibi_slopes)
    row.check(dense, block_size, *right, extra=rounding(dense, scale, alibi_slopes), **options)


def with_three_rows(dense):
    query = random([0] * 12, 6, 2, 16, seed=1).query.view(4, 3, 6, 16)
    return dense._replace(query=query)


def one_lane(lane, keys, values):
    """One query of `lane` in lane 0, and keys that are nothing but numbers there."""
    query, key = torch.zeros(1, 1, 16), torch.zeros(len(keys), 1, 16)
    query[..., 0], key[:, 0, 0] = lane, torch.tensor(keys)
    return Dense(query, [key], [torch.tensor(values)[:, None, None].repeat(1, 1, 16)])


@case("PUB-02", least=15)
def test_alibi_distance_is_measured_from_the_query_token(row):
    """slope * (t - S), or the sign reversed: the output survives the shift, the lse does not."""
    slopes = torch.tensor([0.5])
    for tokens, out, lse in ((3, 1.3201567, 0.6802697), (1, 0.0, 0.0)):
        row.check_each_dtype(uniform([tokens]), 2, out, lse, alibi_slopes=slopes)
    # Its cousins: a slope per KV head, per batch, per row; every row's distance its own.
    slopes = torch.tensor([0.5, -0.25, 0.0, 1.5, 0.125, 3.0])
    dense = random([11, 0, 4, 1], 6, 2, 16, sharp=3.0)
    agrees(row, dense, 2, alibi_slopes=slopes)
    agrees(row, with_three_rows(dense), 2, alibi_slopes=slopes)


@case("PUB-11", least=40)
def test_window_counts_the_newest_token(row):
    """Off by one; or accepted and ignored. What is outside isn't touched: tokens, blocks, ids."""
    for window, out, visible in (
        (1, 9.0, 1), (4, 7.5, 4), (10, 4.5, 10), (11, 4.5, 10), (None, 4.5, 10),
    ):  # fmt: skip
        for dense in each_dtype(uniform([10])):
            pool = outside_poisoned(row, dense, window)
            row.check(dense, pool, out, math.log(visible), window=window)
    # Its cousins: rows' windows of their own, ragged lengths, edges of blocks and partitions.
    dense = uniform([10, 3, 17, 0])
    for window in (1, 2, 4, 5, 16):
        pool = outside_poisoned(row, dense, window)
        row.check(dense, pool, *oracle(*dense, window=window), window=window)
    two = uniform([10])
    two = two._replace(query=two.query.expand(2, 1, 16)[None].contiguous())
    right = torch.tensor([6.5, 7.5])[None, :, None, None].expand(1, 2, 1, 16)
    row.check(two, outside_poisoned(row, two, 4), right, math.log(4), window=4)


def outside_poisoned(row, dense, window):
    """A pool of blocks of 4 where nothing is left of what no row's window holds: its tokens' slots
    are NaN, and the ids of its blocks are nobody's."""
    rows = dense.query.shape[1] if dense.query.dim() == 4 else 1
    unseen = [0 if window is None else max(0, len(k) - rows + 1 - window) for k in dense.keys]
    keys, values = ([x.clone() for x in xs] for xs in (dense.keys, dense.values))
    for first, key, value in zip(unseen, keys, values):
        key[:first] = value[:first] = NAN
    pool = row.pool(Dense(dense.query, keys, values), 4)
    for seq, first in enumerate(unseen):
        for column in range(first // 4):
            pool.block_tables[seq, column] = GARBAGE[column % len(GARBAGE)]
    return pool


@case("PUB-12", least=20)
def test_a_sink_is_counted_once(row):
    """Added once a partition, or dropped on one path; not multiplied by scale."""
    ones = uniform([12])._replace(values=[torch.ones(12, 1, 16)])
    for sinks, out, lse in (
        (torch.tensor([math.log(4)]), 0.75, 2.7725887),
        (None, 1.0, 2.4849066),
    ):
        for scale in (1.0, 0.25):
            how = {"scale": scale, "sinks": sinks, "sizes": (4, 8, 12)}
            row.check_each_dtype(ones, 4, out, lse, **how)
    # Its cousins: one per query head, not KV head; once for each row; all there is to an empty
    # sequence's lse; far above or below every logit; scaled by nothing, capped by nothing.
    sinks = torch.tensor([0.5, -2.0, 90.0, 1.0, -INF, -90.0])
    dense = random([13, 0, 4, 1], 6, 2, 16, sharp=3.0)
    agrees(row, dense, 4, scale=0.5, sinks=sinks, softcap=2.0)
    agrees(row, with_three_rows(dense), 4, sinks=sinks)


@case("PUB-13", least=12)
def test_softcap_comes_after_scale_before_the_mask_and_never_overflows(row):
    """exp overflows in a home-made tanh, or capping revives masked keys, or the cap is unused."""
    for logits, values, cap, window, out, lse in (
        ([10000.0, -10000.0], [1.0, 3.0], 50.0, None, 1.0, 50.0),
        ([27.4653072, 0.0], [1.0, 0.0], 50.0, None, 0.99999999999, 25.0),
        ([60.0, 0.0, -60.0], [1.0, 0.0, 0.0], 30.0, None, None, 28.9208274),
        ([60.0, 0.0, -60.0], [1.0, 2.0, 4.0], 30.0, 2, 2.0, 0.0),
    ):
        options = {"scale": 0.5, "softcap": cap, "window": window}
        for dense in each_dtype(one_lane(2.0, logits, values)):
            for got, got_lse in row.answers(dense.query, row.pool(dense, 4), **options):
                if out is not None:
                    row.close(got, out, dtype=dense.query.dtype)
                if got_lse is not None:
                    row.close(got_lse, lse, dtype=torch.float32)
    # Its cousins: before the bias, which may exceed it; before a row's own mask.
    dense = random([13, 0, 4], 6, 2, 16, sharp=9.0)
    for options in ({"alibi_slopes": torch.linspace(0.1, 6.0, 6)}, {"window": 3}, {}):
        agrees(row, dense, 4, softcap=2.5, **options)


@case("PUB-14", least=8)
def test_very_negative_logits_are_still_logits(row):
    """A finite stand-in for -inf beats real logits: out is 0, or masked slots keep weight."""
    options = [{}] if row.is_stage else [{}, {"window": 5}, {"window": 9}]
    values = torch.arange(5.0).tolist()
    for size, lse in ((60000.0, -59998.3906), (3e37, -3e37)):
        dense = one_lane(-1.0, [size] * 5, values)
        for block_size in (2, 16):
            for option in options:
                for out, got in row.answers(dense.query, row.pool(dense, block_size), **option):
                    row.close(out, 2.0, dtype=torch.float32)
                    error = 0.0 if got is None else (got.double() - lse).abs().max().item()
                    row.true(error <= max(4e-3, 1e-6 * abs(lse) * (size > 1e5)), error)
    if row.is_stage:
        return
    # Its cousins: biased so far down; beside a sink, and under one that outweighs them all.
    row.check(uniform([5]), 2, 4.0, 0.0, alibi_slopes=torch.tensor([1e5]))
    dense = uniform([5])
    dense = Dense(dense.query - 1.0, [torch.full_like(dense.keys[0], 1e4)], dense.values)
    for sink, out, lse in ((-16e4, 5 / 3, -16e4 + math.log(6)), (0.0, 0.0, 0.0)):
        sinks = torch.tensor([sink])
        for got, got_lse in row.answers(dense.query, row.pool(dense, 2), sinks=sinks):
            row.close(got, out, dtype=torch.float32)
            if got_lse is not None:
                row.true((got_lse.double() - lse).abs().max() <= 2e-2, got_lse)


@case("PUB-23", least=20)
def test_several_query_tokens_see_the_history_and_not_the_future(row):
    """A mask aligned to the top left hides the history; padding keys join when not causal."""
    for q_len, tokens, causal, rows, lses in (
        (2, 5, True, [1.5, 2.0], [math.log(4), math.log(5)]),
        (3, 1, True, [0.0, 0.0, 3.0], [-INF, -INF, 0.0]),
        (2, 5, False, [2.0, 2.0], [math.log(5)] * 2),
        (3, 0, False, [0.0] * 3, [-INF] * 3),
    ):
        plain = uniform([tokens])
        if tokens == 1:
            plain.values[0].fill_(3.0)
        out = torch.tensor(rows)[None, :, None, None].expand(1, q_len, 1, 16)
        lse = torch.tensor(lses)[None, :, None]
        for dense in each_dtype(plain._replace(query=torch.zeros(1, q_len, 1, 16))):
            outs = row.check(dense, 4, out, lse, causal=causal)
            row.true(all(x.shape == dense.query.shape for x in outs), "out has query's shape")
            row.true(all((x[0, lse[0, :, 0] == -INF] == 0).all() for x in outs), "exactly 0")
    # Its cousins: heads of a group and rows are not mixed up; rows that end in different blocks
    # and partitions; sequences shorter than q_len; one row given as a row.
    for q_len in (1, 2, 5):
        dense = random([13, 0, 4, 1, 9], 6 * q_len, 2, 16, sharp=4.0)
        dense = dense._replace(query=dense.query.view(5, q_len, 6, 16))
        for causal in (True, False):
            agrees(row, dense, 4, causal=causal)
