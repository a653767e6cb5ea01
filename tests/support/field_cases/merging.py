"""How partial results come together: empty states, the log's base, rounding, a row's bits."""

from __future__ import annotations

import functools
import math

import torch
from helpers import INF, STAGE_NAMES, generated, oracle, paged, to, uniform

from paged_attention import merge_states

from .judging import answers, case, check, each_dtype


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
    for dense in each_dtype(uniform([4]), judge.device):
        pool = paged(dense, 16, layout, device=judge.device)
        check(judge, path, layout, dense, pool, 1.5, 1.3862944)


@case("PUB-21", least=19)
def test_a_rows_bits_do_not_depend_on_its_batch(judge, layout, path):
    """The split is chosen from the whole batch, so a row's bits move with its neighbours."""
    device = judge.device
    sizes = {"sizes": (256,), "capacity": 8000} if path in ("exact", "capacity") else {}

    def row(batch):
        lens, at, seed = batch
        dense, pool = batch_with_row_0(lens, at, seed, layout, device)
        out, lse = next(answers(path, dense.query, pool, layout, scale=0.125, **sizes))
        return out[at], lse[at]

    alone = row(((1000,), 0, 1))
    judge.close(alone[0], oracle(*generated([1000], 8, 2, 64), 0.125)[0][0])
    neighbours = tuple(1 + 37 * n % 101 for n in range(7 if path == "capacity" else 63))
    for batch in (
        *(((1000,), 0, 10 + repeat) for repeat in range(5)),
        ((1000, *neighbours), 0, 2),
        ((*neighbours, 1000), len(neighbours), 3),
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
    if path in STAGE_NAMES:
        return
    # Its cousin: nor is the sum rounded on its way to an `out` in float32, with a sink merged.
    sinks = torch.zeros(1, device=judge.device)
    right, _ = oracle(*dense, 1.0, sinks=sinks)
    for out, _ in answers(path, dense.query.float(), pool, layout, sizes=(16,), sinks=sinks):
        judge.close(out, right, dtype=torch.float32)
