"""What is read, and as what: layouts, head and block sizes, strides, offsets, the KV head."""

from __future__ import annotations

import math

import helpers
import pytest
import torch
from helpers import NAN, STAGE_NAMES, Dense, Pool, generated, oracle, paged, to, uniform

from paged_attention import paged_attention
from paged_attention.inputs import pack, unpack

from .judging import answers, case, check, each_dtype
from .rows import PAGED


@case("PUB-01", least=4)
def test_plain_tensors_reach_the_op_through_a_worked_layout(judge, layout, path):
    """K's split by x or the table misplaced: plausible but wrong numbers."""
    for dtype in (torch.float32, torch.float16):
        dense = to(generated([40], 32, 8, 128), dtype, judge.device)
        pool = paged(dense, 32, layout, tables=[[3, 1]], num_blocks=5, device=judge.device)
        if path == "pack":
            packed_by_the_helper(judge, layout, dense, pool)
            continue
        right = torch.tensor(
            [
                [-0.0853390, -0.1627555, 0.0938737],
                [0.0549693, -0.0751864, -0.0544913],
                [-0.2423493, 0.0962008, -0.0204549],
            ]
        )
        for out, lse in answers(path, dense.query, pool, layout, scale=0.25, sizes=(32, 512)):
            judge.close(out[0, [0, 5, 18]][:, [0, 1, 127]], right, dtype=dtype)
            if lse is not None:
                right_lse = torch.tensor([4.0675488, 4.2411163, 4.0006946])
                judge.close(lse[0, [0, 5, 18]], right_lse, dtype=torch.float32)


def packed_by_the_helper(judge, layout, dense, pool):
    """`pack` writes what the layouts' definitions say, and `unpack` gives the same bits back."""
    dtype = dense.query.dtype
    pages = torch.zeros(2, 5, 32, 8, 128, dtype=dtype, device=judge.device)
    for t in range(40):
        pages[0, (3, 1)[t // 32], t % 32] = dense.keys[0][t]
        pages[1, (3, 1)[t // 32], t % 32] = dense.values[0][t]
    key, value = pack(pages[0], pages[1], layout)
    judge.true(key.shape == pool.key_cache.shape, "packed key's shape")
    judge.same(key, torch.nan_to_num(pool.key_cache, nan=0.0))
    judge.same(value, torch.nan_to_num(pool.value_cache, nan=0.0))
    for dense_page, back in zip(pages, unpack(key, value, layout)):
        judge.same(back, dense_page)
    if layout == "vllm":
        x = helpers.lanes_per_chunk(dtype)
        for t, g, d in ((0, 0, 0), (39, 7, 127), (31, 3, 5), (32, 4, 66)):
            packed = key[(3, 1)[t // 32], g, d // x, t % 32, d % x]
            judge.true(packed == dense.keys[0][t, g, d], f"token {t}, head {g}, lane {d}")


@case("PUB-03", least=28)
def test_head_size_need_not_be_a_power_of_two(judge, layout, path):
    """A hard error, or the padded lanes leak into the result."""
    for head_size in (32, 56, 72, 80, 96, 100, 112, 120, 192, 256):
        query = torch.zeros(1, 1, head_size)
        query[..., -1] = 1.0
        key = torch.zeros(10, 1, head_size)
        key[7, 0, -1] = math.log(9)
        value = torch.arange(10.0)[:, None, None] + torch.arange(head_size) / 1000
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            dense = to(Dense(query, [key], [value]), dtype, judge.device)
            if layout == "vllm" and head_size % helpers.lanes_per_chunk(dtype):
                with pytest.raises(ValueError, match="100"):
                    pages = torch.zeros(1, 16, 1, head_size, dtype=dtype, device=judge.device)
                    pack(pages, pages, layout)
                continue
            pool = paged(dense, 16, layout, device=judge.device)
            out, lse = oracle(*dense, 1.0)
            if dtype == torch.float32:
                formula = 5.6111111 + torch.arange(head_size, dtype=torch.float64) / 1000
                assert (out - formula).abs().max() < 1e-6 and abs(lse - 2.8903718).max() < 1e-6
            check(judge, path, layout, dense, pool, out, lse)


@case("PUB-04", least=19)
def test_a_partition_that_does_not_divide_the_page_loses_no_tail(judge, layout, path):
    """Sizes advertised as valid crash, or the end of each page is skipped."""
    dense = to(uniform([3072]), device=judge.device)
    for block_size in (1, 8, 16, 32, 48, 64, 96, 128, 192, 256):
        backwards = [list(range(3072 // block_size))[::-1]]
        pool = paged(dense, block_size, layout, tables=backwards, device=judge.device)
        naive = path in STAGE_NAMES and block_size == 1
        sizes = {"sizes": (4096,) if naive else (512, 4096)}
        check(judge, path, layout, dense, pool, 1535.5, 8.0300841, **sizes)


@case("PUB-15", least=1)
def test_block_offsets_beyond_32_bits(judge, layout, path):
    """Block id times stride wraps negative: a crash, or quiet garbage.

    On a CPU nothing but the last block is ever touched of the 8 GiB asked for.
    """
    device = judge.device
    caches = helpers.empty_caches(131073, 16, 8, 128, layout, torch.float16, device)
    assert caches[0].numel() == 2147500032
    for cache, last in zip(caches, (0.5, 1.0)):
        if device == "cuda":
            cache.fill_(NAN)
        cache[-1] = last
    query = torch.ones(1, 8, 128, dtype=torch.float16, device=device)
    table = torch.tensor([[131072]], dtype=torch.int32, device=device)
    pool = Pool(*caches, table, torch.tensor([16], dtype=torch.int32, device=device))
    for options in ({}, {"window": 5}):
        for out, _ in answers(path, query, pool, layout, sizes=(16,), **options):
            judge.true((out == 1.0).all(), "the last block was read")


@case("PUB-16", least=6)
def test_strided_views_are_read_and_written_by_their_strides(judge, layout, path):
    """q cut from packed QKV, K/V halves of one pool, `out` a view: read with assumed strides."""
    device = judge.device
    rng = torch.Generator().manual_seed(16)
    packed = torch.randn(4, (32 + 8) * 128, generator=rng).to(device)
    query = packed[:, :4096].view(4, 32, 128)
    lens = [33, 16, 5, 47]
    blocks, num_heads_kv, head_size = 12, 4, 128
    per_block = 16 * num_heads_kv * head_size
    pool = torch.randn(blocks, 2, per_block, generator=rng).to(device)
    shapes = [
        cache.shape[1:]
        for cache in helpers.empty_caches(0, 16, num_heads_kv, head_size, layout, torch.float32)
    ]
    key, value = (half.view(-1, *shape) for half, shape in zip(pool.unbind(1), shapes))
    assert not key.is_contiguous() and not query.is_contiguous()
    ids = helpers.shuffled(blocks, 3)
    table = torch.tensor([ids[0:3], ids[3:4] + [-1, -1], ids[4:5] + [99, 7], ids[5:8]])
    wide = torch.full((4, 6), -1, dtype=torch.int32, device=device)
    wide[:, ::2] = table.to(device)
    table = wide[:, ::2]
    lens = torch.tensor([v for n in lens for v in (n, 999)], dtype=torch.int32, device=device)[::2]
    before = packed.clone(), pool.clone(), wide.clone()

    views = Pool(key, value, table, lens)
    copies = Pool(*(t.contiguous() for t in views))
    strided = list(answers(path, query, views, layout, scale=0.1))
    plain = list(answers(path, query.contiguous(), copies, layout, scale=0.1))
    dense_pairs = [
        helpers.load(*copies[:2], layout, 16, table[b].tolist(), n, num_heads_kv, head_size)
        for b, n in enumerate(lens.tolist())
    ]
    right, _ = oracle(query, [k for k, _ in dense_pairs], [v for _, v in dense_pairs], 0.1)
    for (out, lse), (other, other_lse) in zip(strided, plain):
        judge.close(out, right, dtype=torch.float32)
        judge.same(out, other)
        if lse is not None:
            judge.same(lse, other_lse, "lse")
    if path in PAGED:
        bigger = torch.full((8, 32, 128), 7.0, device=device)
        size = {"single tile": 64, "P=bs": 16, "P=4bs": 64}[path]
        how = {"layout": layout, "scale": 0.1, "partition_size": size, "out": bigger[::2]}
        paged_attention(query, *views, **how)
        judge.same(bigger[::2], plain[0][0])
        judge.true((bigger[1::2] == 7.0).all(), "the rows in between are untouched")
        # Its cousin: rows of several query tokens, whose `out` has the heads before the rows.
        rows = query.unflatten(1, (2, 16)).contiguous()
        tall = torch.full((4, 16, 2, 256), 7.0, device=device)
        how.update(out=tall.transpose(1, 2)[..., ::2])
        paged_attention(rows, *views, **how)
        judge.same(how["out"], paged_attention(rows, *copies, **{**how, "out": None}))
        judge.true((tall[..., 1::2] == 7.0).all(), "the lanes in between are untouched")
    for tensor, copy in zip((packed, pool, wide), before):
        judge.same(tensor, copy, "an input")


@case("PUB-17", least=6)
def test_a_query_head_uses_its_own_groups_kv_head(judge, layout, path):
    """Tile instead of repeat-interleave; a group of 3, 6 or 7 refused."""
    for num_heads, num_kv_heads in ((6, 2), (9, 3), (28, 4), (8, 1), (4, 4)):
        plain = uniform([5], num_heads, num_kv_heads)
        value = torch.arange(1.0, num_kv_heads + 1)[None, :, None].repeat(5, 1, 16)
        group = num_heads // num_kv_heads
        right = torch.tensor([float(h // group + 1) for h in range(num_heads)])
        right = right[None, :, None].expand(1, num_heads, 16)
        for dense in each_dtype(plain._replace(values=[value]), judge.device):
            pool = paged(dense, 2, layout, device=judge.device)
            check(judge, path, layout, dense, pool, right)
        if path in STAGE_NAMES:
            continue
        # Its cousin: the rows of several query tokens are not heads.
        dense = to(plain._replace(values=[value]), device=judge.device)
        rows = dense._replace(query=dense.query.new_zeros(1, 3, num_heads, 16))
        check(judge, path, layout, rows, pool=paged(dense, 2, layout, device=judge.device),
              out=right.unsqueeze(1).expand(1, 3, num_heads, 16))  # fmt: skip
    if path in STAGE_NAMES:
        return
    dense = to(uniform([5], 6, 4), device=judge.device)
    pool = paged(dense, 2, layout, device=judge.device)
    judge.refused(lambda: list(answers(path, dense.query, pool, layout)), ("6", "4"))
