"""How partial results come together: empty states, the log's base, rounding, a row's bits."""

from __future__ import annotations

import functools
import math

import torch
from helpers import oracle
from pools import INF, generated, paged, to, uniform

from paged_attention import merge_states

from .judging import case


@case("PUB-06", least=9)
def test_merge_of_empty_states_is_empty(row):
    """-inf minus -inf inside the merge."""
    full = torch.tensor([[[2.0, 4.0]]], device=row.device), torch.full((1, 1), 1.5).to(row.device)
    empty = torch.zeros_like(full[0]), torch.full_like(full[1], -INF)

    def merged(*states):
        return merge_states(*(torch.stack(parts) for parts in zip(*states)))

    empties = [([empty] * n, empty) for n in (2, 10)]
    for states, right in (([empty, full], full), ([full, empty], full), *empties):
        for name, got, expected in zip(("out", "lse"), merged(*states), right):
            row.same(got, expected, name)
    try:
        merged(full, (full[0], torch.full_like(full[1], INF)))
    except ValueError as error:
        row.true("inf" in str(error), "the refusal says what it refuses")
    else:
        row.true("inf" in (merge_states.__doc__ or ""), "an lse of +inf is documented")


@case("PUB-07", least=2)
def test_lse_is_a_natural_log_for_producer_and_merger(row):
    """Base 2 met base e: long prefixes get far too much weight."""
    if row.path != "merge":
        return row.check_each_dtype(uniform([4]), 16, 1.5, 1.3862944)
    outs = torch.tensor([0.0, 1.0], device=row.device).reshape(2, 1, 1, 1)
    lses = torch.tensor([math.log(4095), 0.0], device=row.device).reshape(2, 1, 1)
    out, lse = merge_states(outs, lses)
    row.close(out, 1 / 4096, extra=0.0)
    row.true(abs(out.item() - 1 / 4096) < 1e-9, "to nine places")
    row.close(lse, math.log(4096), what="lse")


@case("PUB-21", least=19)
def test_a_rows_bits_do_not_depend_on_its_batch(row):
    """The split is chosen from the whole batch, so a row's bits move with its neighbours."""
    sizes = {"sizes": (256,), "capacity": 8000} if row.is_plan else {}

    def decoded(lens, at, seed):
        dense, pool = batch_with_row_0(lens, at, seed, row.layout, row.device)
        out, lse = next(row.answers(dense.query, pool, scale=0.125, **sizes))
        return out[at], lse[at]

    alone = decoded((1000,), 0, 1)
    row.close(alone[0], oracle(*generated([1000], 8, 2, 64), 0.125)[0][0])
    neighbours = tuple(1 + 37 * n % 101 for n in range(7 if row.path == "capacity" else 63))
    for batch in (
        *(((1000,), 0, 10 + repeat) for repeat in range(5)),
        ((1000, *neighbours), 0, 2),
        ((*neighbours, 1000), len(neighbours), 3),
        ((1000, 8000), 0, 4),
        ((0, 8000, 1000, 0), 2, 5),
    ):
        for got, first in zip(decoded(*batch), alone):
            if row.device == "cpu":
                row.same(got, first)
            else:  # CUDA eager: within 2e-6
                row.close(got, first.double())


@functools.lru_cache(maxsize=16)
def batch_with_row_0(lens, at, seed, layout, device):
    """Rows of the generator: number 0 at `at`, others around it."""
    numbers = list(range(1, len(lens) + 1))
    numbers[at] = 0
    dense = to(generated(lens, 8, 2, 64, numbers), device=device)
    return dense, paged(dense, 16, layout, seed=seed, device=device)


@case("PUB-22", least=1)
def test_partials_are_not_rounded_before_the_merge(row):
    """Splitting costs accuracy because partial outputs have the output's dtype."""
    values = torch.tensor(([1.0009765625] * 9 + [1.0] * 7) * 2 + [1.0] * 16)
    dense = uniform([48])._replace(values=[values[:, None, None].repeat(1, 1, 16)])
    dense = to(dense, torch.float16)
    pool = row.pool(dense, 16)
    for out in row.outs(dense.query, pool, sizes=(16,)):
        row.true((out.half() == 1.0).all(), f"{out.max().item()} where 1.0 is right")
    if row.is_stage:
        return
    # Its cousin: nor is the sum rounded on its way to an `out` in float32, with a sink merged.
    sinks = torch.zeros(1)
    right, _ = oracle(*dense, 1.0, sinks=sinks)
    for out in row.outs(dense.query.float(), pool, sizes=(16,), sinks=sinks):
        row.close(out, right, dtype=torch.float32)
