"""What is read, and as what: layouts, head and block sizes, strides, offsets, the KV head."""

from __future__ import annotations

import math

import pools
import pytest
import torch
from helpers import DTYPES, oracle
from pools import NAN, Dense, Pool, generated, to, uniform

from paged_attention import paged_attention
from paged_attention.inputs import pack, unpack

from .judging import case
from .rows import PAGED


@case("PUB-01", least=4)
def test_plain_tensors_reach_the_op_through_a_worked_layout(row):
    """K's split by x or the table misplaced: plausible but wrong numbers."""
    right = torch.tensor(
        [
            [-0.0853390, -0.1627555, 0.0938737],
            [0.0549693, -0.0751864, -0.0544913],
            [-0.2423493, 0.0962008, -0.0204549],
        ]
    )
    for dtype in (torch.float32, torch.float16):
        dense = to(generated([40], 32, 8, 128), dtype)
        pool = row.pool(dense, 32, tables=[[3, 1]], num_blocks=5)
        if row.path == "pack":
            packed_by_the_helper(row, dense, pool)
            continue
        for out, lse in row.answers(dense.query, pool, scale=0.25, sizes=(32, 512)):
            row.close(out[0, [0, 5, 18]][:, [0, 1, 127]], right, dtype=dtype)
            if lse is not None:
                right_lse = torch.tensor([4.0675488, 4.2411163, 4.0006946])
                row.close(lse[0, [0, 5, 18]], right_lse, dtype=torch.float32)


def packed_by_the_helper(row, dense, pool):
    """`pack` writes what the layouts' definitions say, and `unpack` gives the same bits back."""
    pages = torch.zeros(2, 5, 32, 8, 128, dtype=dense.query.dtype, device=row.device)
    for t in range(40):
        for page, tensor in zip(pages, (dense.keys[0], dense.values[0])):
            page[(3, 1)[t // 32], t % 32] = tensor[t]
    key, value = pack(*pages, row.layout)
    row.true(key.shape == pool.key_cache.shape, "packed key's shape")
    row.same(key, torch.nan_to_num(pool.key_cache, nan=0.0))
    row.same(value, torch.nan_to_num(pool.value_cache, nan=0.0))
    for page, back in zip(pages, unpack(key, value, row.layout)):
        row.same(back, page)
    if row.layout == "vllm":
        x = pools.lanes_per_chunk(key.dtype)
        for t, g, d in ((0, 0, 0), (39, 7, 127), (31, 3, 5), (32, 4, 66)):
            packed = key[(3, 1)[t // 32], g, d // x, t % 32, d % x].cpu()
            row.true(packed == dense.keys[0][t, g, d], f"token {t}, head {g}, lane {d}")


@case("PUB-03", least=28)
def test_head_size_need_not_be_a_power_of_two(row):
    """A hard error, or the padded lanes leak into the result."""
    for head_size in (32, 56, 72, 80, 96, 100, 112, 120, 192, 256):
        query, key = torch.zeros(1, 1, head_size), torch.zeros(10, 1, head_size)
        query[..., -1], key[7, 0, -1] = 1.0, math.log(9)
        value = torch.arange(10.0)[:, None, None] + torch.arange(head_size) / 1000
        for dtype in DTYPES:
            dense = to(Dense(query, [key], [value]), dtype)
            if row.layout == "vllm" and head_size % pools.lanes_per_chunk(dtype):
                with pytest.raises(ValueError, match="100"):
                    pages = torch.zeros(1, 16, 1, head_size, dtype=dtype, device=row.device)
                    pack(pages, pages, row.layout)
                continue
            out, lse = oracle(*dense, 1.0)
            if dtype == torch.float32:
                formula = 5.6111111 + torch.arange(head_size, dtype=torch.float64) / 1000
                assert (out - formula).abs().max() < 1e-6 and abs(lse - 2.8903718).max() < 1e-6
            row.check(dense, 16, out, lse)


@case("PUB-04", least=19)
def test_a_partition_that_does_not_divide_the_page_loses_no_tail(row):
    """Sizes advertised as valid crash, or the end of each page is skipped."""
    dense = uniform([3072])
    for block_size in (1, 8, 16, 32, 48, 64, 96, 128, 192, 256):
        backwards = [list(range(3072 // block_size))[::-1]]
        sizes = (4096,) if row.is_stage and block_size == 1 else (512, 4096)
        pool = row.pool(dense, block_size, tables=backwards)
        row.check(dense, pool, 1535.5, 8.0300841, sizes=sizes)


@case("PUB-15", least=1)
def test_block_offsets_beyond_32_bits(row):
    """Block id times stride wraps negative: a crash, or quiet garbage.

    On a CPU nothing but the last block is ever touched of the 8 GiB asked for.
    """
    caches = pools.empty_caches(131073, 16, 8, 128, row.layout, torch.float16, row.device)
    assert caches[0].numel() == 2147500032
    for cache, last in zip(caches, (0.5, 1.0)):
        if row.device == "cuda":
            cache.fill_(NAN)
        cache[-1] = last
    ids = (torch.tensor(x, dtype=torch.int32, device=row.device) for x in ([[131072]], [16]))
    pool, query = Pool(*caches, *ids), torch.ones(1, 8, 128, dtype=torch.float16)
    for options in ({}, {"window": 5}):
        for out in row.outs(query, pool, sizes=(16,), **options):
            row.true((out == 1.0).all(), "the last block was read")


@case("PUB-16", least=6)
def test_strided_views_are_read_and_written_by_their_strides(row):
    """q cut from packed QKV, K/V halves of one pool, `out` a view: read with assumed strides."""
    rng = torch.Generator().manual_seed(16)
    packed = torch.randn(4, (32 + 8) * 128, generator=rng).to(row.device)
    query = packed[:, :4096].view(4, 32, 128)
    blocks, heads, size, lens = 12, 4, 128, [33, 16, 5, 47]
    halves = torch.randn(blocks, 2, 16 * heads * size, generator=rng).to(row.device)
    like = pools.empty_caches(0, 16, heads, size, row.layout, torch.float32)
    key, value = (half.view(-1, *x.shape[1:]) for half, x in zip(halves.unbind(1), like))
    assert not key.is_contiguous() and not query.is_contiguous()
    ids = pools.shuffled(blocks, 3)
    table = torch.tensor([ids[0:3], ids[3:4] + [-1, -1], ids[4:5] + [99, 7], ids[5:8]])
    wide = torch.full((4, 6), -1, dtype=torch.int32, device=row.device)
    wide[:, ::2] = table.to(row.device)
    apart = torch.tensor([v for n in lens for v in (n, 999)], dtype=torch.int32, device=row.device)
    before = packed.clone(), halves.clone(), wide.clone()

    views = Pool(key, value, wide[:, ::2], apart[::2])
    copies = Pool(*(t.contiguous() for t in views))
    plain = list(row.answers(query.contiguous(), copies, scale=0.1))
    pairs = [
        pools.load(*copies[:2], row.layout, 16, table[b].tolist(), n, heads, size)
        for b, n in enumerate(lens)
    ]
    right, _ = oracle(query, *zip(*pairs), 0.1)
    for (out, lse), (other, other_lse) in zip(row.answers(query, views, scale=0.1), plain):
        row.close(out, right, dtype=torch.float32)
        row.same(out, other)
        if lse is not None:
            row.same(lse, other_lse, "lse")
    if row.path in PAGED:
        bigger = torch.full((8, 32, 128), 7.0, device=row.device)
        partition_size = {"single tile": 64, "P=bs": 16, "P=4bs": 64}[row.path]
        how = {"layout": row.layout, "scale": 0.1, "partition_size": partition_size}
        paged_attention(query, *views, **how, out=bigger[::2])
        row.same(bigger[::2], plain[0][0])
        row.true((bigger[1::2] == 7.0).all(), "the rows in between are untouched")
        # Its cousin: rows of several query tokens, whose `out` has the heads before the rows.
        rows = query.unflatten(1, (2, 16)).contiguous()
        tall = torch.full((4, 16, 2, 256), 7.0, device=row.device)
        out = paged_attention(rows, *views, **how, out=tall.transpose(1, 2)[..., ::2])
        row.same(out, paged_attention(rows, *copies, **how))
        row.true((tall[..., 1::2] == 7.0).all(), "the lanes in between are untouched")
    for tensor, copy in zip((packed, halves, wide), before):
        row.same(tensor, copy, "an input")


@case("PUB-17", least=6)
def test_a_query_head_uses_its_own_groups_kv_head(row):
    """Tile instead of repeat-interleave; a group of 3, 6 or 7 refused."""
    for num_heads, num_kv_heads in ((6, 2), (9, 3), (28, 4), (8, 1), (4, 4)):
        value = torch.arange(1.0, num_kv_heads + 1)[None, :, None].repeat(5, 1, 16)
        dense = uniform([5], num_heads, num_kv_heads)._replace(values=[value])
        right = value[0].repeat_interleave(num_heads // num_kv_heads, 0)[None]
        row.check_each_dtype(dense, 2, right)
        if not row.is_stage:  # its cousin: the rows of several query tokens are not heads
            rows = dense._replace(query=torch.zeros(1, 3, num_heads, 16))
            row.check(rows, 2, right.unsqueeze(1).expand(1, 3, num_heads, 16))
    if not row.is_stage:
        dense = uniform([5], 6, 4)
        row.refuses(("6", "4"), lambda: row.outs(dense.query, row.pool(dense, 2)))
