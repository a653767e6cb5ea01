"""Faults that users of other paged-attention kernels reported in public, restated as small inputs.

Each test is one fault and runs in every layout and on every path that could have it; PUB-nn is its
number. A path is a way to get the same answer: one partition ("single tile"), two phases with
partitions of one or four blocks, each lesson stage (they know only the vllm layout), the float64
reference, a merge.

A row is (case, layout, path, device). A row counts as run only if its test came to its end having
judged something; the last test of this file compares the rows that ran with ROWS and prints them
as a table: a case that quietly didn't run is a failure.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import time

import helpers
import pytest
import torch
from helpers import INF, LAYOUTS, NAN, STAGE_NAMES, Dense, generated, paged, to, uniform

from paged_attention import (
    Workspace,
    merge_states,
    paged_attention,
    plan_decode,
    reference_attention,
)
from paged_attention.counting import OpCounter, count
from paged_attention.layouts import pack, unpack
from paged_attention.stages import STAGES

# -- the rows that must run

PAGED = ("single tile", "P=bs", "P=4bs")
EVERY_PATH = {
    "vllm": (*PAGED, "reference", *STAGE_NAMES),
    "HND": (*PAGED, "reference"),
    "NHD": (*PAGED, "reference"),
}


def each_layout(*paths, stages=()):
    return {layout: paths + (stages if layout == "vllm" else ()) for layout in LAYOUTS}


ROWS = {
    "PUB-01": {k: ("pack", *v) for k, v in EVERY_PATH.items()},
    "PUB-02": each_layout("reference"),
    "PUB-03": EVERY_PATH,
    "PUB-04": each_layout("P=512", "P=4096", "reference", stages=STAGE_NAMES),
    "PUB-05": EVERY_PATH,
    "PUB-06": {"-": ("merge",)},
    "PUB-07": {**EVERY_PATH, "-": ("merge",)},
    "PUB-08": EVERY_PATH,
    "PUB-09": EVERY_PATH,
    "PUB-10": each_layout("single tile", "P=512", stages=STAGE_NAMES),
    "PUB-11": each_layout("reference"),
    "PUB-12": each_layout("reference"),
    "PUB-13": each_layout("reference"),
    "PUB-14": EVERY_PATH,
    "PUB-16": EVERY_PATH,
    "PUB-17": EVERY_PATH,
    "PUB-18": each_layout(
        "single tile", "P=512", stages=("gqa_broadcast", "single_tile", "fused_phase2")
    ),
    "PUB-19": each_layout("reference"),
    "PUB-20": each_layout("single tile", "P=bs", "reference"),
    "PUB-21": each_layout("P=256", "default"),
    "PUB-22": EVERY_PATH,
    "PUB-23": each_layout("reference"),
    "PUB-24": each_layout("single tile", "P=bs", "P=512", "exact", "capacity"),
    "PUB-25": {"-": ("measure",)},
}
CUDA_ROWS = {"PUB-15": each_layout("default")}  # 8 GiB of cache: only there
if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 10 * 2**30:
    CUDA_ROWS = {}
ON_CPU_ONLY = ("PUB-25",)
NOT_YET = {
    "PUB-15": "(a) no code of ours computes element offsets; (b) runs on CUDA",
}
THE_WHOLE_LIST = [f"PUB-{n:02d}" for n in range(1, 26)]


def rows_of(case, device):
    table = ROWS.get(case) if device == "cpu" else {**ROWS, **CUDA_ROWS}.get(case)
    if table is None or (device == "cuda" and case in ON_CPU_ONLY):
        return []
    return [(case, layout, path, device) for layout, paths in table.items() for path in paths]


def required_rows():
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return {row for device in devices for case in THE_WHOLE_LIST for row in rows_of(case, device)}


# -- running a row

JUDGED: dict[tuple, int] = {}  # row -> how many results it judged
STARTED: set[str] = set()  # node ids of this file's tests that ran in this process


class Judge:
    """Compares, and counts its comparisons: a row that judged nothing did not run."""

    def __init__(self, device):
        self.device, self.count = device, 0

    def close(self, actual, expected, **how):
        helpers.assert_close(actual, expected, **how)
        self.count += 1

    def same(self, actual, expected, what="out"):
        helpers.assert_same(actual, expected, what)
        self.count += 1

    def true(self, claim, what):
        assert claim, what
        self.count += 1

    def refused(self, call, words, error=ValueError):
        with pytest.raises(error) as caught:
            call()
        message = str(caught.value)
        missing = [word for word in words if word not in message]
        assert not missing, f"{message!r} doesn't mention {missing}"
        self.count += 1


def case(number, least):
    """Run the test for every row of case `number`; each must judge at least `least` results."""

    def wrap(test):
        @functools.wraps(test)
        def one_row(request, layout, path, device):
            judge = Judge(device)
            test(judge, layout, path)
            assert judge.count >= least, f"judged {judge.count} results, expected {least}"
            JUDGED[number, layout, path, device] = judge.count

        one_row.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in ("request", "layout", "path", "device")
            ]
        )
        del one_row.__wrapped__
        params = [
            pytest.param(*row[1:], id="-".join(row), marks=marks)
            for device, marks in (("cpu", ()), ("cuda", helpers.cuda.marks))
            for row in rows_of(number, device)
        ]
        return pytest.mark.parametrize("layout, path, device", params)(one_row)

    return wrap


@pytest.fixture(autouse=True)
def _started(request):
    STARTED.add(request.node.nodeid)


def answers(path, query, pool, layout, *, scale=1.0, judge=None, **more):
    """Every answer this path gives: (out, lse), lse None where the path has none."""
    call = (query, *pool[:4])
    block_size = pool.value_cache.shape[1 if layout == "NHD" else -1 if layout == "vllm" else 2]
    longest = max([1, *pool.seq_lens.tolist()])
    sizes = {"single tile": longest, "P=bs": block_size, "P=4bs": 4 * block_size, "default": None}
    if path in STAGE_NAMES:
        for size in more.get("sizes", (longest, block_size, 4 * block_size)):
            yield STAGES[path](*call, scale, partition_size=size), None
    elif path == "reference":
        yield reference_attention(*call, layout=layout, scale=scale)
    else:
        size = sizes[path] if path in sizes else int(path[2:])
        yield paged_attention(
            *call, layout=layout, scale=scale, partition_size=size, return_lse=True
        )
        out = torch.full_like(query, NAN)  # what the caller's buffer held before must not matter
        given = paged_attention(*call, layout=layout, scale=scale, partition_size=size, out=out)
        assert given.data_ptr() == out.data_ptr()
        yield out, None


def check(judge, path, layout, dense, pool, out, lse=None, scale=1.0, **more):
    """All of a path's answers against the right out and lse; returns the outputs."""
    outs = []
    for got, got_lse in answers(path, dense.query, pool, layout, scale=scale, **more):
        judge.close(got, out, dtype=dense.query.dtype)
        if lse is not None and got_lse is not None:
            judge.close(got_lse, lse, dtype=torch.float32, what="lse")
        outs.append(got)
    return outs


# -- the cases


@case("PUB-01", least=4)
def test_plain_tensors_reach_the_op_through_a_worked_layout(judge, layout, path):
    """K's split by x or the table misplaced: plausible but wrong numbers."""
    for dtype in (torch.float32, torch.float16):
        dense = to(generated([40], 32, 8, 128), dtype, judge.device)
        pool = paged(dense, 32, layout, tables=[[3, 1]], num_blocks=5, device=judge.device)
        if path == "pack":
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
            continue
        right = torch.tensor(
            [
                [-0.0853390, -0.1627555, 0.0938737],
                [0.0549693, -0.0751864, -0.0544913],
                [-0.2423493, 0.0962008, -0.0204549],
            ]
        )
        sizes = {"sizes": (32, 512)}
        for out, lse in answers(path, dense.query, pool, layout, scale=0.25, **sizes):
            judge.close(out[0, [0, 5, 18]][:, [0, 1, 127]], right, dtype=dtype)
            if lse is not None:
                right_lse = torch.tensor([4.0675488, 4.2411163, 4.0006946])
                judge.close(lse[0, [0, 5, 18]], right_lse, dtype=torch.float32)


@case("PUB-02", least=4)
def test_alibi_distance_is_measured_from_the_query_token(judge, layout, path):
    """slope * (t - S), or the sign reversed: the output survives the shift, the lse does not."""
    slopes = torch.tensor([0.5], device=judge.device)
    for tokens, out, lse in ((3, 1.3201567, 0.6802697), (1, 0.0, 0.0)):
        dense = to(uniform([tokens]), device=judge.device)
        pool = paged(dense, 2, layout, device=judge.device)
        got, got_lse = reference_attention(
            dense.query, *pool, layout=layout, scale=1.0, alibi_slopes=slopes
        )
        judge.close(got, out, dtype=torch.float32)
        judge.close(got_lse, lse, dtype=torch.float32)


@case("PUB-03", least=38)
def test_head_size_need_not_be_a_power_of_two(judge, layout, path):
    """A hard error, or the padded lanes leak into the result."""
    for head_size in (32, 56, 72, 80, 96, 100, 112, 120, 192, 256):
        query = torch.zeros(1, 1, head_size)
        query[..., -1] = 1.0
        key = torch.zeros(10, 1, head_size)
        key[7, 0, -1] = math.log(9)
        value = torch.arange(10.0)[:, None, None] + torch.arange(head_size) / 1000
        for dtype in (torch.float32, torch.float16):
            dense = to(Dense(query, [key], [value]), dtype, judge.device)
            if layout == "vllm" and head_size % helpers.lanes_per_chunk(dtype):
                with pytest.raises(ValueError, match="100"):
                    pages = torch.zeros(1, 16, 1, head_size, dtype=dtype, device=judge.device)
                    pack(pages, pages, layout)
                continue
            pool = paged(dense, 16, layout, device=judge.device)
            out, lse = helpers.oracle(*dense, 1.0)
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
        sizes = {"sizes": (4096,) if block_size == 1 else (512, 4096)}
        check(judge, path, layout, dense, pool, 1535.5, 8.0300841, **sizes)


@case("PUB-05", least=8)
def test_empty_sequences_give_zero_and_disturb_nobody(judge, layout, path):
    """Rows of length 0 give 0/0 or keep what the buffer held."""
    lens, device = [3, 0, 5, 1], judge.device
    dense = to(uniform(lens), device=device)
    pool = paged(dense, 16, layout, device=device)
    right = torch.tensor([1.0, 0.0, 2.0, 0.0])[:, None, None].expand(4, 1, 16)
    lse = torch.tensor([math.log(3), -INF, math.log(5), 0.0], dtype=torch.float64)[:, None]
    outs = check(judge, path, layout, dense, pool, right, lse)
    keep = [0, 2, 3]
    fewer = helpers.Pool(*pool[:2], pool.block_tables[keep], pool.seq_lens[keep])
    without = [out for out, _ in answers(path, dense.query[keep], fewer, layout)]
    for out, other in zip(outs, without):
        judge.true((out[1] == 0).all(), "an empty sequence's output is exactly 0")
        judge.same(out[keep], other)

    nothing = to(uniform([0, 0]), device=device)
    pool = paged(nothing, 16, layout, device=device)
    check(judge, path, layout, nothing, pool, 0.0, -INF)

    none = pool._replace(block_tables=pool.block_tables[:0], seq_lens=pool.seq_lens[:0])
    for out, lse in answers(path, dense.query[:0], none, layout):
        judge.true(out.shape == (0, 1, 16), "no sequences, no rows")
        if lse is not None:
            judge.true(lse.shape == (0, 1), "no sequences, no lse")


@case("PUB-06", least=9)
def test_merge_of_empty_states_is_empty(judge, layout, path):
    """-inf minus -inf inside the merge."""
    device = judge.device
    full = torch.tensor([[[2.0, 4.0]]], device=device), torch.tensor([[1.5]], device=device)
    empty = torch.zeros(1, 1, 2, device=device), torch.full((1, 1), -INF, device=device)

    def merged(*states):
        return merge_states(
            torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])
        )

    for states, right in (
        ([empty, empty], empty),
        ([empty, full], full),
        ([full, empty], full),
        ([empty] * 10, empty),
    ):
        out, lse = merged(*states)
        judge.same(out, right[0])
        judge.same(lse, right[1], "lse")
    infinite = torch.full((1, 1), INF, device=device)
    try:
        merged(full, (full[0], infinite))
    except ValueError as error:
        judge.true("inf" in str(error), "the refusal says what it refuses")
    else:
        judge.true("inf" in (merge_states.__doc__ or ""), "an lse of +inf is documented")


@case("PUB-07", least=2)
def test_lse_is_a_natural_log_for_producer_and_merger(judge, layout, path):
    """Base 2 met base e: long prefixes get far too much weight."""
    if path == "merge":
        outs = torch.tensor([0.0, 1.0], device=judge.device).reshape(2, 1, 1, 1)
        lses = torch.tensor([math.log(4095), 0.0], device=judge.device).reshape(2, 1, 1)
        out, lse = merge_states(outs, lses)
        judge.close(out, 1 / 4096, extra=0.0)
        judge.true(abs(out.item() - 1 / 4096) < 1e-9, "to nine places")
        judge.close(lse, math.log(4096), what="lse")
        return
    dense = to(uniform([4]), device=judge.device)
    pool = paged(dense, 16, layout, device=judge.device)
    check(judge, path, layout, dense, pool, 1.5, 1.3862944)


@case("PUB-08", least=11)
def test_nan_and_inf_in_the_last_page_never_reach_the_result(judge, layout, path):
    """Probability 0 times NaN is NaN."""
    dense = to(uniform([13]), device=judge.device)
    clean = paged(dense, 4, layout, poison=(0.0, 0.0), device=judge.device)
    zeroed = check(judge, path, layout, dense, clean, 6.0, 2.5649494)
    for poison in ((NAN, NAN), (INF, -INF), (0.5, NAN)):
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
    if path in STAGE_NAMES:
        return  # the lessons leave checking to the kernel
    for bad in (4, -1):
        wrong = table.clone()
        wrong[0, 1] = bad
        wrong = pool._replace(block_tables=wrong)
        judge.refused(
            lambda wrong=wrong: list(answers(path, dense.query, wrong, layout)),
            ("block_tables", "0", "1", str(bad), "4"),
        )


@case("PUB-10", least=2)
def test_max_seq_len_below_the_longest_sequence_loses_no_token(judge, layout, path):
    """The partition count all share is computed too small and the newest tokens vanish."""
    dense = to(uniform([1030, 520]), device=judge.device)
    pool = paged(dense, 16, layout, device=judge.device)
    right = torch.tensor([514.5, 259.5])[:, None, None].expand(2, 1, 16)
    outs = check(judge, path, layout, dense, pool, right, sizes=(512, 2048))
    if path in STAGE_NAMES:
        return
    how = {"layout": layout, "scale": 1.0, "partition_size": 512 if path == "P=512" else 2048}
    for most in (1030, 4096):
        judge.same(paged_attention(dense.query, *pool, max_seq_len=most, **how), outs[0])
    judge.refused(
        lambda: paged_attention(dense.query, *pool, max_seq_len=1024, **how),
        ("max_seq_len", "1024", "1030"),
    )


@case("PUB-11", least=10)
def test_window_counts_the_newest_token(judge, layout, path):
    """Off by one; or accepted and ignored."""
    dense = to(uniform([10]), device=judge.device)
    for window, out, visible in (
        (1, 9.0, 1),
        (4, 7.5, 4),
        (10, 4.5, 10),
        (11, 4.5, 10),
        (None, 4.5, 10),
    ):
        poisoned = to(dense)
        outside = 0 if window is None else max(0, 10 - window) // 4 * 4  # whole blocks
        poisoned.keys[0] = poisoned.keys[0].clone()
        poisoned.values[0] = poisoned.values[0].clone()
        poisoned.keys[0][:outside] = NAN
        poisoned.values[0][:outside] = NAN
        pool = paged(poisoned, 4, layout, device=judge.device)
        got, lse = reference_attention(dense.query, *pool, layout=layout, scale=1.0, window=window)
        judge.close(got, out, dtype=torch.float32)
        judge.close(lse, math.log(visible), dtype=torch.float32)


@case("PUB-12", least=8)
def test_a_sink_is_counted_once(judge, layout, path):
    """Added once a partition, or dropped on one path; not multiplied by scale."""
    dense = to(uniform([12]), device=judge.device)
    dense = dense._replace(values=[torch.ones_like(dense.values[0])])
    pool = paged(dense, 4, layout, device=judge.device)
    for sink, out, lse in (
        (torch.tensor([math.log(4)], device=judge.device), 0.75, 2.7725887),
        (None, 1.0, 2.4849066),
    ):
        for scale in (1.0, 0.25):
            got, got_lse = reference_attention(
                dense.query, *pool, layout=layout, scale=scale, sinks=sink
            )
            judge.close(got, out, dtype=torch.float32)
            judge.close(got_lse, lse, dtype=torch.float32)


@case("PUB-13", least=7)
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
        dense = to(Dense(query, [key], [value]), device=judge.device)
        pool = paged(dense, 4, layout, device=judge.device)
        got, got_lse = reference_attention(
            dense.query, *pool, layout=layout, scale=0.5, softcap=cap, window=window
        )
        if out is not None:
            judge.close(got, out, dtype=torch.float32)
        judge.close(got_lse, lse, dtype=torch.float32)


@case("PUB-14", least=8)
def test_very_negative_logits_are_still_logits(judge, layout, path):
    """A finite stand-in for -inf beats real logits: out is 0, or masked slots keep weight."""
    for size, lse in ((60000.0, -59998.3906), (3e37, -3e37)):
        query = torch.zeros(1, 1, 16)
        query[..., 0] = -1.0
        key = torch.zeros(5, 1, 16)
        key[..., 0] = size
        value = torch.arange(5.0)[:, None, None].repeat(1, 1, 16)
        dense = to(Dense(query, [key], [value]), device=judge.device)
        for block_size in (2, 16):
            pool = paged(dense, block_size, layout, device=judge.device)
            for out, got_lse in answers(path, dense.query, pool, layout):
                judge.close(out, 2.0, dtype=torch.float32)
                if got_lse is not None:
                    error = (got_lse.double() - lse).abs().max().item()
                    judge.true(error <= max(4e-3, 1e-6 * abs(lse) * (size > 1e5)), error)


@case("PUB-15", least=1)
def test_block_offsets_beyond_32_bits(judge, layout, path):
    """Block id times stride wraps negative: a crash, or quiet garbage."""
    caches = helpers.empty_caches(131073, 16, 8, 128, layout, torch.float16, "cuda")
    assert caches[0].numel() == 2147500032
    for cache, last in zip(caches, (0.5, 1.0)):
        cache.fill_(NAN)
        cache[-1] = last
    query = torch.ones(1, 8, 128, dtype=torch.float16, device="cuda")
    table = torch.tensor([[131072]], dtype=torch.int32, device="cuda")
    lens = torch.tensor([16], dtype=torch.int32, device="cuda")
    out = paged_attention(query, *caches, table, lens, layout=layout)
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

    views = helpers.Pool(key, value, table, lens)
    copies = helpers.Pool(*(t.contiguous() for t in views))
    strided = list(answers(path, query, views, layout, scale=0.1))
    plain = list(answers(path, query.contiguous(), copies, layout, scale=0.1))
    dense_pairs = [
        helpers.load(*copies[:2], layout, 16, table[b].tolist(), n, num_heads_kv, head_size)
        for b, n in enumerate(lens.tolist())
    ]
    right, _ = helpers.oracle(query, [k for k, _ in dense_pairs], [v for _, v in dense_pairs], 0.1)
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
    for tensor, copy in zip((packed, pool, wide), before):
        judge.same(tensor, copy, "an input")


@case("PUB-17", least=6)
def test_a_query_head_uses_its_own_groups_kv_head(judge, layout, path):
    """Tile instead of repeat-interleave; a group of 3, 6 or 7 refused."""
    for num_heads, num_kv_heads in ((6, 2), (9, 3), (28, 4), (8, 1), (4, 4)):
        dense = uniform([5], num_heads, num_kv_heads)
        value = torch.arange(1.0, num_kv_heads + 1)[None, :, None].repeat(5, 1, 16)
        dense = to(dense._replace(values=[value]), device=judge.device)
        pool = paged(dense, 2, layout, device=judge.device)
        group = num_heads // num_kv_heads
        right = torch.tensor([float(h // group + 1) for h in range(num_heads)])
        check(judge, path, layout, dense, pool, right[None, :, None].expand(1, num_heads, 16))
    if path in STAGE_NAMES:
        return
    dense = to(uniform([5], 6, 4), device=judge.device)
    pool = paged(dense, 2, layout, device=judge.device)
    judge.refused(lambda: list(answers(path, dense.query, pool, layout)), ("6", "4"))


@case("PUB-18", least=2)
def test_grouped_heads_never_copy_keys_or_values_for_each_query_head(judge, layout, path):
    """Temporaries grow with the query heads instead of the KV heads."""
    num_seqs, num_heads, num_kv_heads, head_size, tokens = 8, 32, 4, 128, 4096
    if path in STAGE_NAMES:
        num_seqs = 1  # they work one sequence at a time: a batch would hide the copy
    blocks = num_seqs * tokens // 16
    caches = helpers.empty_caches(
        blocks, 16, num_kv_heads, head_size, layout, torch.float16, judge.device
    )
    caches[0].fill_(0.5)
    caches[1].fill_(1.0)
    table = torch.tensor(helpers.shuffled(blocks, 0), dtype=torch.int32, device=judge.device)
    lens = torch.full((num_seqs,), tokens, dtype=torch.int32, device=judge.device)
    query = torch.ones(num_seqs, num_heads, head_size, dtype=torch.float16, device=judge.device)
    call = (query, *caches, table.reshape(num_seqs, -1), lens)
    with OpCounter() as counter:
        if path in STAGE_NAMES:
            out = STAGES[path](*call, 0.1, partition_size=512)
        else:
            size = 512 if path == "P=512" else tokens
            out = paged_attention(*call, layout=layout, scale=0.1, partition_size=size)
    judge.close(out, 1.0)
    limit = num_seqs * num_kv_heads * tokens * head_size
    judge.true(counter.largest <= limit, f"{counter.largest:,} elements, above {limit:,}")
    if path == "gqa_broadcast":  # the rung before it does copy, and this test sees it
        made = count(lambda: STAGES["single_bmm"](*call, 0.1, partition_size=512)).largest
        judge.true(made >= num_heads * tokens * head_size, made)


@case("PUB-19", least=31)
def test_fp8_scales_always_multiply(judge, layout, path):
    """Scales accepted but lost in one calling style; k's and v's swapped."""
    as_bytes = {
        torch.float8_e4m3fn: {0.0: 0x00, 1.0: 0x38, 4.0: 0x48, NAN: 0x7F},
        torch.float8_e5m2: {0.0: 0x00, 1.0: 0x3C, 4.0: 0x44, NAN: 0x7F},
    }
    scale = 1 / 16
    right, right_lse = 1.1243530, 0.8259394
    number = functools.partial(torch.tensor, device=judge.device)
    query = torch.ones(1, 1, 16, device=judge.device)
    for fp8, names in (
        (torch.float8_e4m3fn, ("fp8", "fp8_e4m3", "auto")),
        (torch.float8_e5m2, ("fp8_e5m2", "auto")),
    ):
        code = as_bytes[fp8]
        key = torch.tensor([code[1.0], code[0.0]], dtype=torch.uint8)[:, None, None]
        value = torch.tensor([code[4.0], code[0.0]], dtype=torch.uint8)[:, None, None]
        dense = Dense(query, [key.repeat(1, 1, 16)], [value.repeat(1, 1, 16)])
        poison = (code[NAN], code[NAN])
        pool = paged(dense, 16, layout, dtype=torch.uint8, poison=poison, device=judge.device)
        for name in names:
            caches = [c.view(fp8) if name == "auto" else c for c in pool[:2]]
            call = (query, *caches, *pool[2:])
            for kind in (float, number, lambda v: number([v])):
                k_scale, v_scale = kind(0.25), kind(0.5)
                out, lse = reference_attention(
                    *call,
                    layout=layout,
                    scale=scale,
                    kv_cache_dtype=name,
                    k_scale=k_scale,
                    v_scale=v_scale,
                )
                judge.close(out, right, dtype=torch.float32)
                judge.close(lse, right_lse, dtype=torch.float32)
    judge.refused(
        lambda: reference_attention(query, *pool, layout=layout),
        ("uint8", "auto"),
        (ValueError, TypeError),
    )


@case("PUB-20", least=15)
def test_mixed_dtypes_convert_by_value_and_metadata_may_be_int64(judge, layout, path):
    """Bits reinterpreted; int64 lengths make the second sequence zeros; cryptic matmul errors."""
    device = judge.device
    dense = to(uniform([3, 5]), device=device)
    halves = dense._replace(values=[torch.full_like(v, 1.5) for v in dense.values])
    pool = paged(halves, 16, layout, dtype=torch.float16, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        for out, _ in answers(path, dense.query.to(dtype), pool, layout):
            judge.close(out, 1.5)

    right = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 1, 16)
    pool = paged(dense, 16, layout, device=device)
    outs = {}
    for table_dtype in (torch.int32, torch.int64):
        for lens_dtype in (torch.int32, torch.int64):
            typed = pool._replace(
                block_tables=pool.block_tables.to(table_dtype),
                seq_lens=pool.seq_lens.to(lens_dtype),
            )
            outs[table_dtype, lens_dtype] = check(judge, path, layout, dense, typed, right)
    for others in outs.values():
        judge.same(others[0], outs[torch.int32, torch.int32][0])

    def refused(words, error=(ValueError, TypeError), query=dense.query, **change):
        wrong = pool._replace(**change)
        judge.refused(lambda: list(answers(path, query, wrong, layout)), words, error)

    refused(("seq_lens", "float"), seq_lens=pool.seq_lens.float())
    refused(("block_tables", "float"), block_tables=pool.block_tables.float())
    refused(("block_tables", "meta"), ValueError, block_tables=pool.block_tables.to("meta"))
    refused(("value_cache",), ValueError, value_cache=pool.value_cache[:-1])
    refused(("64", "16"), ValueError, query=torch.zeros(2, 1, 64, device=device))
    if device == "cuda":  # the planner reads lengths on the host, so they may live there
        check(judge, path, layout, dense, pool._replace(seq_lens=pool.seq_lens.cpu()), right)


@case("PUB-21", least=19)
def test_a_rows_bits_do_not_depend_on_its_batch(judge, layout, path):
    """The split is chosen from the whole batch, so a row's bits move with its neighbours."""
    device = judge.device

    def row(batch):
        lens, at, seed = batch
        dense, pool = batch_with_row_0(lens, at, seed, layout, device)
        out, lse = next(answers(path, dense.query, pool, layout, scale=0.125))
        return out[at], lse[at]

    alone = row(((1000,), 0, 1))
    judge.close(alone[0], helpers.oracle(*generated([1000], 8, 2, 64), 0.125)[0][0])
    neighbours = tuple(1 + 37 * n % 101 for n in range(63))
    for batch in (
        *(((1000,), 0, 10 + repeat) for repeat in range(5)),
        ((1000, *neighbours), 0, 2),
        ((*neighbours, 1000), 63, 3),
        ((1000, 8000), 0, 4),
        ((0, 8000, 1000, 0), 2, 5),
    ):
        for got, first in zip(row(batch), alone):
            if device == "cpu":
                judge.same(got, first)
            else:  # CUDA eager: within 2e-6
                judge.close(got, first.double())


@functools.lru_cache(maxsize=16)
def batch_with_row_0(lens, at, seed, layout, device):
    """Rows of the generator: number 0 at `at`, others around it."""
    numbers = list(range(1, len(lens) + 1))
    numbers[at] = 0
    dense = to(generated(lens, 8, 2, 64, numbers), device=device)
    return dense, paged(dense, 16, layout, seed=seed, device=device)


@case("PUB-22", least=1)
def test_partials_are_not_rounded_before_the_merge(judge, layout, path):
    """Splitting costs accuracy because partial outputs have the output's dtype."""
    values = ([1.0009765625] * 9 + [1.0] * 7) * 2 + [1.0] * 16
    value = torch.tensor(values)[:, None, None].repeat(1, 1, 16)
    dense = to(uniform([48])._replace(values=[value]), torch.float16, judge.device)
    pool = paged(dense, 16, layout, device=judge.device)
    for out, _ in answers(path, dense.query, pool, layout, sizes=(16,)):
        judge.true((out.half() == 1.0).all(), f"{out.max().item()} where 1.0 is right")


@case("PUB-23", least=12)
def test_several_query_tokens_see_the_history_and_not_the_future(judge, layout, path):
    """A mask aligned to the top left hides the history; padding keys join when not causal."""
    for q_len, tokens, causal, rows, lses in (
        (2, 5, True, [1.5, 2.0], [math.log(4), math.log(5)]),
        (3, 1, True, [0.0, 0.0, 0.0], [-INF, -INF, 0.0]),
        (2, 5, False, [2.0, 2.0], [math.log(5)] * 2),
        (3, 0, False, [0.0] * 3, [-INF] * 3),
    ):
        dense = to(uniform([tokens]), device=judge.device)
        if tokens == 1:
            dense.values[0].fill_(3.0)
            rows = [0.0, 0.0, 3.0]
        pool = paged(dense, 4, layout, device=judge.device)
        query = torch.zeros(1, q_len, 1, 16, device=judge.device)
        out, lse = reference_attention(query, *pool, layout=layout, scale=1.0, causal=causal)
        judge.true(out.shape == query.shape, "out has the query's shape")
        judge.close(
            out[0, :, 0], torch.tensor(rows)[:, None].expand(q_len, 16), dtype=torch.float32
        )
        judge.close(lse[0, :, 0], torch.tensor(lses), dtype=torch.float32)


@case("PUB-24", least=6)
def test_a_reused_workspace_holds_no_leftovers_and_a_run_no_host_read(judge, layout, path):
    """Leftovers are reduced again; decisions frozen at capture go stale; a sync in each step."""
    device, workspace = judge.device, Workspace()
    pools, right = {}, {4096: 2047.5, 16: 7.5, 1: 0.0}
    for tokens in right:
        dense = to(uniform([tokens]), device=device)
        pools[tokens] = dense.query, paged(dense, 16, layout, device=device)
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_size": 16, "block_size": 16}
    make_plan = functools.partial(plan_decode, **shape, layout=layout, device=device)
    capacity = make_plan(num_seqs=1, max_seq_len=4096)
    for tokens in (4096, 16, 4096, 1):
        query, pool = pools[tokens]
        for tensor in workspace.tensors():
            tensor.fill_(NAN)
        how = {"scale": 1.0, "workspace": workspace}
        if path in ("exact", "capacity"):
            plan = capacity if path == "capacity" else make_plan(seq_lens=[tokens])
            out = plan.run(query, *pool, **how)
        else:
            size = {"single tile": tokens, "P=bs": 16, "P=512": 512}[path]
            out = paged_attention(query, *pool, layout=layout, partition_size=size, **how)
        judge.close(out, right[tokens])

    dense = to(uniform([4096, 4096]), device=device)
    pool = paged(dense, 16, layout, device=device)
    plan = make_plan(num_seqs=2, max_seq_len=4096)
    if path == "exact":
        plan = make_plan(seq_lens=[7, 4095])
    out = torch.empty_like(dense.query)
    how = {"scale": 1.0, "workspace": workspace, "out": out}
    plan.run(dense.query, *pool, **how)
    pool.seq_lens.copy_(torch.tensor([7, 4095]))
    out.fill_(NAN)
    with OpCounter() as counter:
        plan.run(dense.query, *pool, **how)
    judge.close(out[0], 3.0)
    judge.close(out[1], 2047.0)
    judge.true(counter.host_reads == 0, "no host read")
    judge.true(counter.peak_bytes == 0, f"{counter.peak_bytes} bytes were allocated")


@case("PUB-25", least=4)
def test_a_time_includes_the_work_a_device_still_owes(judge, layout, path):
    """Numbers that only measure the launch: here the work ends 50 ms after it."""
    import test_measure  # the measuring helper's own tests: they hold the rest of this case

    from paged_attention.measure import measure

    source = inspect.getsource(test_measure)
    judge.true("stub" in source and "synchronize" in source, "test_measure tests a stub device")
    done_at, log = 0.0, []

    def launch():
        nonlocal done_at
        log.append("launch")
        done_at = max(done_at, time.perf_counter()) + 0.05

    def synchronize():
        log.append("sync")
        time.sleep(max(0.0, done_at - time.perf_counter()))

    measured = measure(launch, device="stub", synchronize=synchronize, min_seconds=0.1)
    judge.true(0.05 <= measured.seconds < 0.25, f"{measured.seconds} s for work of 0.05 s")
    judge.true(log[-1] == "sync", "waited before the last reading")
    judge.true("sync" in log[: log.index("launch") + 2], "waited around the first launch")


# -- the matrix


def chosen_by_hand(config):
    """What on the command line picked some of the tests, if anything did."""
    picks = [f"-k {config.option.keyword}"] if config.option.keyword else []
    picks += [f"-m {config.option.markexpr}"] if config.option.markexpr else []
    picks += [arg for arg in config.args if "::" in str(arg)]
    picks += [
        name for name in ("lf", "last_failed", "stepwise") if getattr(config.option, name, False)
    ]
    return ", ".join(picks + [str(d) for d in config.option.deselect or ()])


def table_of(judged):
    """A line for each case, a column for each path; a cell says in which layouts it ran (v, H, N:
    vllm, HND, NHD; of the stages: which) and how many results were judged."""
    paths = dict.fromkeys(path for _, _, path, _ in sorted(judged) if path not in STAGE_NAMES)
    columns = sorted(paths, key=[*PAGED, *paths].index) + ["stages"]
    for device in dict.fromkeys(row[3] for row in judged):
        yield f"{device:8}" + "".join(f"{column:>12}" for column in columns)
        for number in THE_WHOLE_LIST:
            mine = {r[1:3]: n for r, n in judged.items() if (r[0], r[3]) == (number, device)}
            cells = {column: ["", 0] for column in columns}
            for (layout, path), judged_here in sorted(mine.items()):
                stage = path in STAGE_NAMES
                cell = cells["stages" if stage else path]
                cell[0] += str(STAGE_NAMES.index(path) + 1) if stage else layout[0]
                cell[1] += judged_here
            line = "".join(
                f"{''.join(sorted(w)) + f' {n}' if n else '':>12}" for w, n in cells.values()
            )
            yield f"{number:8}" + (
                line.rstrip() if mine else f"  {NOT_YET.get(number, 'did not run')}"
            )


def test_the_matrix_of_cases_is_complete(request, capsys):
    def fail(text):
        pytest.fail(text, pytrace=False)

    mine = [i for i in request.session.items if i.path == request.node.path]
    rows = {i.callspec.id: i.nodeid for i in mine if hasattr(i, "callspec")}
    if not torch.cuda.is_available():
        rows = {row: node for row, node in rows.items() if not row.endswith("-cuda")}
    required = {"-".join(row) for row in required_rows()}
    ran = {"-".join(row) for row in JUDGED}
    with capsys.disabled():  # an xdist worker's stdout goes nowhere
        stream = sys.stderr if "PYTEST_XDIST_WORKER" in os.environ else sys.stdout
        print("\n" + "\n".join(table_of(JUDGED)), file=stream, flush=True)

    if set(ROWS) | set(NOT_YET) != set(THE_WHOLE_LIST):
        fail("a case is in no list")
    if extra := sorted(ran - required):
        fail(f"rows nobody asked for: {extra}")
    if elsewhere := sorted(row for row, node in rows.items() if node not in STARTED):
        fail(f"ran in another process or not at all (with xdist: --dist loadfile): {elsewhere}")
    if missing := sorted(set(rows) - ran):
        fail(f"{len(missing)} rows did not come to their end: {missing}")
    if missing := sorted(required - ran):
        by_hand = chosen_by_hand(request.config)
        if by_hand and not os.environ.get("CI"):
            pytest.skip(f"{len(ran)} of {len(required)} rows, those chosen by {by_hand}")
        fail(f"{len(missing)} of {len(required)} rows were not run: {missing}")
