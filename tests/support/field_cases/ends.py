"""Where a sequence ends: empty ones, tails, padding, bounds. What lies beyond is never read."""

from __future__ import annotations

import math

import torch
from pools import INF, NAN, Pool, uniform

from paged_attention import paged_attention

from .judging import case, each_dtype, per_row


@case("PUB-05", least=8)
def test_empty_sequences_give_zero_and_disturb_nobody(row):
    """Rows of length 0 give 0/0 or keep what the buffer held."""
    lse, keep = per_row(math.log(3), -INF, math.log(5), 0.0, rank=2), [0, 2, 3]
    for dense in each_dtype(uniform([3, 0, 5, 1])):
        pool = row.pool(dense, 16)
        outs = row.check(dense, pool, per_row(1.0, 0.0, 2.0, 0.0), lse)
        fewer = Pool(*pool[:2], pool.block_tables[keep], pool.seq_lens[keep])
        for out, other in zip(outs, row.outs(dense.query[keep], fewer)):
            row.true((out[1] == 0).all(), "an empty sequence's output is exactly 0")
            row.same(out[keep], other)

    nothing = uniform([0, 0])
    pool = row.pool(nothing, 16)
    row.check(nothing, pool, 0.0, -INF)
    none = pool._replace(block_tables=pool.block_tables[:0], seq_lens=pool.seq_lens[:0])
    for out, lse in row.answers(nothing.query[:0], none):
        row.true(out.shape == (0, 1, 16), "no sequences, no rows")
        row.true(lse is None or lse.shape == (0, 1), "no sequences, no lse")


@case("PUB-08", least=11)
def test_nan_and_inf_in_the_last_page_never_reach_the_result(row):
    """Probability 0 times NaN is NaN."""
    for dense in each_dtype(uniform([13])):
        zeroed = row.check(dense, row.pool(dense, 4, poison=(0.0, 0.0)), 6.0, 2.5649494)
        for poison in ((NAN, NAN), (INF, -INF), (-INF, INF), (6e4, -6e4), (0.5, NAN)):
            outs = row.check(dense, row.pool(dense, 4, poison=poison), 6.0, 2.5649494)
            for out, other in zip(outs, zeroed):
                row.same(out, other)


@case("PUB-09", least=4)
def test_padding_ids_are_never_followed_and_bad_live_ids_never_clamped(row):
    """Padding dereferenced, or a bad id clamped to block 0 or wrapped: quietly wrong."""
    dense = uniform([17, 3])
    garbage = torch.tensor([[2, 0, -1, 2147483647], [3, -7, 999, -1]], dtype=torch.int32)
    pool = row.pool(dense, 16, tables=[[2, 0], [3]], num_blocks=4)
    pool = pool._replace(block_tables=garbage.to(row.device))
    row.check(dense, pool, per_row(8.0, 1.0), per_row(math.log(17), math.log(3), rank=2))
    row.true(torch.equal(pool.block_tables.cpu(), garbage), "the table is as it was")
    if row.is_stage or row.is_plan:
        return  # the lessons leave checking to the kernel, a plan's run to its caller

    def refuses_block(column, bad, **options):
        table = garbage.clone()
        table[0, column] = bad
        wrong = pool._replace(block_tables=table.to(row.device))
        words = ("block_tables", "0", str(column), str(bad), "4")
        row.refuses(words, lambda: row.outs(dense.query, wrong, **options))
        return wrong

    for bad in (4, -1):
        refuses_block(1, bad)
        # Its cousin: alive for a window that reaches it, dead for one that doesn't.
        refuses_block(1, bad, window=1)
        wrong = refuses_block(0, bad, window=2)
        row.check(dense, wrong, per_row(16.0, 2.0), 0.0, window=1)


@case("PUB-10", least=2)
def test_max_seq_len_below_the_longest_sequence_loses_no_token(row):
    """The partition count all share is computed too small and the newest tokens vanish."""
    dense = uniform([1030, 520])
    pool, query = row.pool(dense, 16), dense.query.to(row.device)
    outs = row.check(dense, pool, per_row(514.5, 259.5), sizes=(512, 2048))
    words = ("max_seq_len", "1024", "1030")
    if row.path == "capacity":  # a run reads no lengths: it can't raise, but won't give a number
        out = row.plan(query, pool, 512, capacity=1024).run(query, *pool, scale=1.0)
        row.true(out[0].isnan().all(), "NaN, not the mean of what fits")
        row.close(out[1], 259.5)
    elif row.path == "exact":
        row.refuses(words, lambda: row.plan(query, pool, 512, capacity=1024))
    elif not row.is_stage:
        size = 512 if row.path == "P=512" else 2048
        how = {"layout": row.layout, "scale": 1.0, "partition_size": size}
        for most in (1030, 4096):
            row.same(paged_attention(query, *pool, max_seq_len=most, **how), outs[0])
        for window in (None, 3):
            how.update(max_seq_len=1024, window=window)
            row.refuses(words, lambda: paged_attention(query, *pool, **how))
