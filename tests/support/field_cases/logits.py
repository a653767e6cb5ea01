"""What is done to a logit, and in what order: bias, window, cap, sink, several query tokens."""

from __future__ import annotations

import math

import torch
from helpers import (
    GARBAGE,
    INF,
    NAN,
    STAGE_NAMES,
    Dense,
    oracle,
    paged,
    random,
    rounding,
    to,
    uniform,
)

from .judging import answers, case, check, each_dtype


def agrees(judge, path, layout, dense, block_size, *, scale=0.25, alibi_slopes=None, **options):
    """All of a path's answers are the oracle's."""
    out, lse = oracle(*dense, scale, slopes=alibi_slopes, **options)
    options.update(scale=scale, alibi_slopes=alibi_slopes)
    pool = paged(dense, block_size, layout, device=judge.device)
    extra = rounding(dense, scale, alibi_slopes)
    check(judge, path, layout, dense, pool, out, lse, extra=extra, **options)


@case("PUB-02", least=15)
def test_alibi_distance_is_measured_from_the_query_token(judge, layout, path):
    """slope * (t - S), or the sign reversed: the output survives the shift, the lse does not."""
    slopes = torch.tensor([0.5], device=judge.device)
    for tokens, out, lse in ((3, 1.3201567, 0.6802697), (1, 0.0, 0.0)):
        for dense in each_dtype(uniform([tokens]), judge.device):
            pool = paged(dense, 2, layout, device=judge.device)
            check(judge, path, layout, dense, pool, out, lse, alibi_slopes=slopes)
    # Its cousins: a slope per KV head, per batch, per row; every row's distance its own.
    slopes = torch.tensor([0.5, -0.25, 0.0, 1.5, 0.125, 3.0], device=judge.device)
    dense = to(random([11, 0, 4, 1], 6, 2, 16, sharp=3.0), device=judge.device)
    agrees(judge, path, layout, dense, 2, alibi_slopes=slopes)
    query = random([0] * 12, 6, 2, 16, seed=1).query.view(4, 3, 6, 16).to(judge.device)
    agrees(judge, path, layout, dense._replace(query=query), 2, alibi_slopes=slopes)


@case("PUB-11", least=40)
def test_window_counts_the_newest_token(judge, layout, path):
    """Off by one; or accepted and ignored. What is outside isn't touched: tokens, blocks, ids."""
    for window, out, visible in (
        (1, 9.0, 1),
        (4, 7.5, 4),
        (10, 4.5, 10),
        (11, 4.5, 10),
        (None, 4.5, 10),
    ):
        for dense in each_dtype(uniform([10]), judge.device):
            pool = outside_poisoned(dense, window, 4, layout, judge.device)
            lse = math.log(visible)
            check(judge, path, layout, dense, pool, out, lse, window=window)
    # Its cousins: rows' windows of their own, ragged lengths, edges of blocks and partitions.
    dense = to(uniform([10, 3, 17, 0]), device=judge.device)
    for window in (1, 2, 4, 5, 16):
        pool = outside_poisoned(dense, window, 4, layout, judge.device)
        out, lse = oracle(*dense, window=window)
        check(judge, path, layout, dense, pool, out, lse, window=window)
    two = to(uniform([10]), device=judge.device)
    two = two._replace(query=two.query.expand(2, 1, 16)[None].contiguous())
    pool = outside_poisoned(two, 4, 4, layout, judge.device)
    right = torch.tensor([6.5, 7.5])[None, :, None, None].expand(1, 2, 1, 16)
    check(judge, path, layout, two, pool, right, math.log(4), window=4)


def outside_poisoned(dense, window, block_size, layout, device):
    """A pool where nothing is left of what no row's window holds: NaN in the tokens' slots, ids
    nobody may follow for the blocks."""
    rows = dense.query.shape[1] if dense.query.dim() == 4 else 1
    lens = [len(k) for k in dense.keys]
    unseen = [0 if window is None else max(0, n - rows + 1 - window) for n in lens]
    keys, values = ([x.clone() for x in xs] for xs in (dense.keys, dense.values))
    for first, key, value in zip(unseen, keys, values):
        key[:first] = value[:first] = NAN
    pool = paged(Dense(dense.query, keys, values), block_size, layout, device=device)
    tables = pool.block_tables.clone()
    for seq, first in enumerate(unseen):
        for column in range(first // block_size):
            tables[seq, column] = GARBAGE[column % len(GARBAGE)]
    return pool._replace(block_tables=tables)


@case("PUB-12", least=20)
def test_a_sink_is_counted_once(judge, layout, path):
    """Added once a partition, or dropped on one path; not multiplied by scale."""
    ones = uniform([12])._replace(values=[torch.ones(12, 1, 16)])
    for dense in each_dtype(ones, judge.device):
        pool = paged(dense, 4, layout, device=judge.device)
        for sink, out, lse in (
            (torch.tensor([math.log(4)], device=judge.device), 0.75, 2.7725887),
            (None, 1.0, 2.4849066),
        ):
            for scale in (1.0, 0.25):
                sizes = {"sizes": (4, 8, 12)}
                how = {"scale": scale, "sinks": sink, **sizes}
                check(judge, path, layout, dense, pool, out, lse, **how)
    # Its cousins: one per query head, not KV head; once for each row; all there is to an empty
    # sequence's lse; far above or below every logit; scaled by nothing, capped by nothing.
    sinks = torch.tensor([0.5, -2.0, 90.0, 1.0, -INF, -90.0], device=judge.device)
    dense = to(random([13, 0, 4, 1], 6, 2, 16, sharp=3.0), device=judge.device)
    agrees(judge, path, layout, dense, 4, scale=0.5, sinks=sinks, softcap=2.0)
    query = random([0] * 12, 6, 2, 16, seed=1).query.view(4, 3, 6, 16).to(judge.device)
    agrees(judge, path, layout, dense._replace(query=query), 4, sinks=sinks)


@case("PUB-13", least=12)
def test_softcap_comes_after_scale_before_the_mask_and_never_overflows(judge, layout, path):
    """exp overflows in a home-made tanh, or capping revives masked keys, or the cap is unused."""
    for logits, values, cap, window, out, lse in (
        ([10000.0, -10000.0], [1.0, 3.0], 50.0, None, 1.0, 50.0),
        ([27.4653072, 0.0], [1.0, 0.0], 50.0, None, 0.99999999999, 25.0),
        ([60.0, 0.0, -60.0], [1.0, 0.0, 0.0], 30.0, None, None, 28.9208274),
        ([60.0, 0.0, -60.0], [1.0, 2.0, 4.0], 30.0, 2, 2.0, 0.0),
    ):
        query = torch.zeros(1, 1, 16)
        query[..., 0] = 2.0
        key = torch.zeros(len(logits), 1, 16)
        key[:, 0, 0] = torch.tensor(logits)
        value = torch.tensor(values)[:, None, None].repeat(1, 1, 16)
        for dense in each_dtype(Dense(query, [key], [value]), judge.device):
            pool = paged(dense, 4, layout, device=judge.device)
            options = {"scale": 0.5, "softcap": cap, "window": window}
            for got, got_lse in answers(path, dense.query, pool, layout, **options):
                if out is not None:
                    judge.close(got, out, dtype=dense.query.dtype)
                if got_lse is not None:
                    judge.close(got_lse, lse, dtype=torch.float32)
    # Its cousins: before the bias, which may exceed it; before a row's own mask.
    dense = to(random([13, 0, 4], 6, 2, 16, sharp=9.0), device=judge.device)
    slopes = torch.linspace(0.1, 6.0, 6, device=judge.device)
    for options in ({"alibi_slopes": slopes}, {"window": 3}, {}):
        agrees(judge, path, layout, dense, 4, softcap=2.5, **options)


@case("PUB-14", least=8)
def test_very_negative_logits_are_still_logits(judge, layout, path):
    """A finite stand-in for -inf beats real logits: out is 0, or masked slots keep weight."""
    options = [{}] if path in STAGE_NAMES else [{}, {"window": 5}, {"window": 9}]
    for size, lse in ((60000.0, -59998.3906), (3e37, -3e37)):
        query = torch.zeros(1, 1, 16)
        query[..., 0] = -1.0
        key = torch.zeros(5, 1, 16)
        key[..., 0] = size
        value = torch.arange(5.0)[:, None, None].repeat(1, 1, 16)
        dense = to(Dense(query, [key], [value]), device=judge.device)
        for block_size in (2, 16):
            pool = paged(dense, block_size, layout, device=judge.device)
            for option in options:
                for out, got_lse in answers(path, dense.query, pool, layout, **option):
                    judge.close(out, 2.0, dtype=torch.float32)
                    if got_lse is not None:
                        error = (got_lse.double() - lse).abs().max().item()
                        judge.true(error <= max(4e-3, 1e-6 * abs(lse) * (size > 1e5)), error)
    if path in STAGE_NAMES:
        return
    # Its cousins: biased so far down; beside a sink, and under one that outweighs them all.
    dense = to(uniform([5]), device=judge.device)
    pool = paged(dense, 2, layout, device=judge.device)
    steep = torch.tensor([1e5], device=judge.device)
    check(judge, path, layout, dense, pool, 4.0, 0.0, alibi_slopes=steep)
    query = torch.full_like(dense.query, -1.0)
    keys = [torch.full_like(dense.keys[0], 1e4)]
    dense = dense._replace(query=query, keys=keys)
    pool = paged(dense, 2, layout, device=judge.device)
    for sink, out, lse in ((-16e4, 5 / 3, -16e4 + math.log(6)), (0.0, 0.0, 0.0)):
        sinks = torch.tensor([sink], device=judge.device)
        for got, got_lse in answers(path, query, pool, layout, sinks=sinks):
            judge.close(got, out, dtype=torch.float32)
            if got_lse is not None:
                judge.true((got_lse.double() - lse).abs().max() <= 2e-2, got_lse)


@case("PUB-23", least=20)
def test_several_query_tokens_see_the_history_and_not_the_future(judge, layout, path):
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
        plain = plain._replace(query=torch.zeros(1, q_len, 1, 16))
        for dense in each_dtype(plain, judge.device):
            pool = paged(dense, 4, layout, device=judge.device)
            out = torch.tensor(rows)[None, :, None, None].expand(1, q_len, 1, 16)
            lse = torch.tensor(lses)[None, :, None]
            outs = check(judge, path, layout, dense, pool, out, lse, causal=causal)
            judge.true(all(x.shape == dense.query.shape for x in outs), "out has query's shape")
            unseen = torch.tensor(lses) == -INF
            judge.true(all((x[0, unseen] == 0).all() for x in outs), "exactly 0")
    # Its cousins: heads of a group and rows are not mixed up; rows that end in different blocks
    # and partitions; sequences shorter than q_len; one row given as a row.
    for q_len in (1, 2, 5):
        lens = [13, 0, 4, 1, 9]
        dense = random(lens, 6 * q_len, 2, 16, sharp=4.0)
        query = dense.query.view(len(lens), q_len, 6, 16)
        dense = to(dense._replace(query=query), device=judge.device)
        for causal in (True, False):
            agrees(judge, path, layout, dense, 4, causal=causal)
