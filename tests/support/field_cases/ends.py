"""Where a sequence ends: empty ones, tails, padding, bounds. What lies beyond is never read."""

from __future__ import annotations

import math

import torch
from helpers import INF, NAN, STAGE_NAMES, Pool, paged, to, uniform
from ways import PLANS, plan_of

from paged_attention import paged_attention

from .judging import answers, case, check, each_dtype


@case("PUB-05", least=8)
def test_empty_sequences_give_zero_and_disturb_nobody(judge, layout, path):
    """Rows of length 0 give 0/0 or keep what the buffer held."""
    lens, device = [3, 0, 5, 1], judge.device
    right = torch.tensor([1.0, 0.0, 2.0, 0.0])[:, None, None].expand(4, 1, 16)
    lse = torch.tensor([math.log(3), -INF, math.log(5), 0.0], dtype=torch.float64)[:, None]
    for dense in each_dtype(uniform(lens), device):
        pool = paged(dense, 16, layout, device=device)
        outs = check(judge, path, layout, dense, pool, right, lse)
        keep = [0, 2, 3]
        fewer = Pool(*pool[:2], pool.block_tables[keep], pool.seq_lens[keep])
        without = [out for out, _ in answers(path, dense.query[keep], fewer, layout)]
        for out, other in zip(outs, without):
            judge.true((out[1] == 0).all(), "an empty sequence's output is exactly 0")
            judge.same(out[keep], other)

    nothing = to(uniform([0, 0]), device=device)
    pool = paged(nothing, 16, layout, device=device)
    check(judge, path, layout, nothing, pool, 0.0, -INF)

    none = pool._replace(block_tables=pool.block_tables[:0], seq_lens=pool.seq_lens[:0])
    for out, lse in answers(path, nothing.query[:0], none, layout):
        judge.true(out.shape == (0, 1, 16), "no sequences, no rows")
        if lse is not None:
            judge.true(lse.shape == (0, 1), "no sequences, no lse")


@case("PUB-08", least=11)
def test_nan_and_inf_in_the_last_page_never_reach_the_result(judge, layout, path):
    """Probability 0 times NaN is NaN."""
    for dense in each_dtype(uniform([13]), judge.device):
        clean = paged(dense, 4, layout, poison=(0.0, 0.0), device=judge.device)
        zeroed = check(judge, path, layout, dense, clean, 6.0, 2.5649494)
        for poison in ((NAN, NAN), (INF, -INF), (-INF, INF), (6e4, -6e4), (0.5, NAN)):
            pool = paged(dense, 4, layout, poison=poison, device=judge.device)
            outs = check(judge, path, layout, dense, pool, 6.0, 2.5649494)
            for out, other in zip(outs, zeroed):
                judge.same(out, other)


@case("PUB-09", least=4)
def test_padding_ids_are_never_followed_and_bad_live_ids_never_clamped(judge, layout, path):
    """Padding dereferenced, or a bad id clamped to block 0 or wrapped: quietly wrong."""
    dense = to(uniform([17, 3]), device=judge.device)
    pool = paged(dense, 16, layout, tables=[[2, 0], [3]], num_blocks=4, device=judge.device)
    garbage = [[2, 0, -1, 2147483647], [3, -7, 999, -1]]
    table = torch.tensor(garbage, dtype=torch.int32, device=judge.device)
    pool = pool._replace(block_tables=table)
    right = torch.tensor([8.0, 1.0])[:, None, None].expand(2, 1, 16)
    lse = torch.tensor([math.log(17), math.log(3)], dtype=torch.float64)[:, None]
    check(judge, path, layout, dense, pool, right, lse)
    judge.true(torch.equal(table.cpu(), torch.tensor(garbage)), "the table is as it was")
    if path in (*STAGE_NAMES, *PLANS):
        return  # the lessons leave checking to the kernel, a plan's run to its caller
    for bad in (4, -1):
        wrong = table.clone()
        wrong[0, 1] = bad
        wrong = pool._replace(block_tables=wrong)
        words = ("block_tables", "0", "1", str(bad), "4")
        judge.refused(lambda wrong=wrong: list(answers(path, dense.query, wrong, layout)), words)
        # Its cousin: alive for a window that reaches it, dead for one that doesn't.
        call = dense.query, wrong, layout
        judge.refused(lambda call=call: list(answers(path, *call, window=1)), words)
        wrong = wrong._replace(block_tables=table.clone())
        wrong.block_tables[0, 0] = bad
        out = torch.tensor([16.0, 2.0])[:, None, None].expand(2, 1, 16)
        check(judge, path, layout, dense, wrong, out, 0.0, window=1)
        words = ("block_tables", "0", "0", str(bad), "4")
        call = dense.query, wrong, layout
        judge.refused(lambda call=call: list(answers(path, *call, window=2)), words)


@case("PUB-10", least=2)
def test_max_seq_len_below_the_longest_sequence_loses_no_token(judge, layout, path):
    """The partition count all share is computed too small and the newest tokens vanish."""
    dense = to(uniform([1030, 520]), device=judge.device)
    pool = paged(dense, 16, layout, device=judge.device)
    right = torch.tensor([514.5, 259.5])[:, None, None].expand(2, 1, 16)
    outs = check(judge, path, layout, dense, pool, right, sizes=(512, 2048))
    if path in STAGE_NAMES:
        return
    if path == "capacity":  # a run reads no lengths: it can't raise, but won't give a number
        plan = plan_of(path, dense.query, pool, layout, 512, capacity=1024)
        out = plan.run(dense.query, *pool, scale=1.0)
        judge.true(out[0].isnan().all(), "NaN, not the mean of what fits")
        judge.close(out[1], 259.5)
        return
    if path == "exact":
        judge.refused(
            lambda: plan_of(path, dense.query, pool, layout, 512, capacity=1024),
            ("max_seq_len", "1024", "1030"),
        )
        return
    how = {"layout": layout, "scale": 1.0, "partition_size": 512 if path == "P=512" else 2048}
    for most in (1030, 4096):
        judge.same(paged_attention(dense.query, *pool, max_seq_len=most, **how), outs[0])
    for window in (None, 3):
        judge.refused(
            lambda window=window: paged_attention(
                dense.query, *pool, max_seq_len=1024, window=window, **how
            ),
            ("max_seq_len", "1024", "1030"),
        )
