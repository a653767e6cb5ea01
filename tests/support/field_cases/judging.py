"""A row of the matrix: every answer its path gives, compared, and the comparisons counted.

A row that judged nothing did not run, so each case says how many results it judges at least.
"""

from __future__ import annotations

import helpers
import pytest
import torch
from helpers import DTYPES, STAGE_NAMES
from pools import NAN, Pool, paged, to
from ways import PLANS, block_size_of, plan_of, second_run, way

from paged_attention import paged_attention, reference_attention
from paged_attention.stages import STAGES

from .rows import rows_of

JUDGED: dict[tuple, int] = {}  # row -> how many results it judged
CASES: dict = {}  # number -> a function of a Row


def case(number, least):
    """Run the test for every row of case `number`; each must judge at least `least` results."""

    def wrap(test):
        CASES[number] = test

        def one_row(place):
            row = Row(*place)
            test(row)
            assert row.count >= least, f"judged {row.count} results, expected {least}"
            JUDGED[(number, *place)] = row.count

        one_row.__name__, one_row.__doc__ = test.__name__, test.__doc__
        params = [
            pytest.param(place, id="-".join((number, *place)), marks=marks)
            for device, marks in (("cpu", ()), ("cuda", helpers.cuda.marks))
            for _, *place in rows_of(number, device)
        ]
        return pytest.mark.parametrize("place", params)(one_row)

    return wrap


class Row:
    """Compares, and counts its comparisons. Tensors of a case may lie on the CPU."""

    def __init__(self, layout, path, device):
        self.layout, self.path, self.device, self.count = layout, path, device, 0
        self.is_stage, self.is_plan = path in STAGE_NAMES, path in PLANS

    def close(self, actual, expected, **how):
        helpers.assert_close(actual, expected, **how)
        self.count += 1

    def same(self, actual, expected, what="out"):
        helpers.assert_same(actual, expected, what)
        self.count += 1

    def true(self, claim, what):
        assert claim, what
        self.count += 1

    def refuses(self, words, call, error=ValueError):
        with pytest.raises(error) as caught:
            call()
        message = str(caught.value)
        missing = [word for word in words if word not in message]
        assert not missing, f"{message!r} doesn't mention {missing}"
        self.count += 1

    def pool(self, dense, block_size, **where):
        dense = to(dense, device=self.device)
        return paged(dense, block_size, self.layout, device=self.device, **where)

    def plan(self, query, pool, partition_size=None, capacity=None):
        return plan_of(self.path, query, pool, self.layout, partition_size, capacity)

    def answers(self, query, pool, *, sizes=None, capacity=None, **options):
        """Every answer this path gives: (out, lse), lse None where the path has none.

        sizes: partition sizes, for paths that run with several;  capacity: of a capacity plan
        """
        options = {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in options.items()}
        options.setdefault("scale", 1.0)
        query, block_size = query.to(self.device), block_size_of(pool, self.layout)
        call, longest = (query, *pool), max([1, *pool.seq_lens.tolist()])
        if self.is_stage:
            for size in sizes or (longest, block_size, 4 * block_size):
                yield STAGES[self.path](*call, options["scale"], partition_size=size), None
        elif self.path == "reference":
            yield reference_attention(*call, layout=self.layout, **options)
        elif self.is_plan:
            window = options.pop("window", None)
            for size in sizes or (block_size, 4 * block_size, None):
                run = way(self.path, query, pool, self.layout, size, capacity, window)
                yield second_run(run, call, **options)
        else:
            own = {"single tile": longest, "P=bs": block_size, "P=4bs": 4 * block_size}
            own["default"] = None
            size = own[self.path] if self.path in own else int(self.path[2:])
            options.update(layout=self.layout, partition_size=size)
            yield paged_attention(*call, return_lse=True, **options)
            out = torch.full_like(query, NAN)  # what the buffer held before must not matter
            given = paged_attention(*call, out=out, **options)
            assert given.data_ptr() == out.data_ptr()
            yield out, None

    def outs(self, *call, **options):
        return [out for out, _ in self.answers(*call, **options)]

    def check(self, dense, where, out, lse=None, *, extra=0.0, **options):
        """All answers against the right out and lse; returns the outputs.

        where: a pool, or the block size of one that is made
        """
        pool, outs = where if isinstance(where, Pool) else self.pool(dense, where), []
        for got, got_lse in self.answers(dense.query, pool, **options):
            self.close(got, out, dtype=dense.query.dtype, extra=extra)
            if lse is not None and got_lse is not None:
                self.close(got_lse, lse, dtype=torch.float32, extra=extra, what="lse")
            outs.append(got)
        return outs

    def check_each_dtype(self, dense, block_size, out, lse=None, **options):
        for typed in each_dtype(dense):
            self.check(typed, block_size, out, lse, **options)


def each_dtype(dense):
    """The same numbers in float32, and in the shorter dtypes that can hold them all."""
    numbers = [dense.query, *dense.keys, *dense.values]
    for dtype in DTYPES:
        if all(torch.equal(x.to(dtype).float(), x.float()) for x in numbers):
            yield to(dense, dtype)


def per_row(*numbers, rank=3):
    """(rows, 1, 16): a number for each sequence, the same in all lanes; rank 2: (rows, 1)."""
    column = torch.tensor(numbers, dtype=torch.float64)[:, None]
    return column if rank == 2 else column[..., None].expand(-1, 1, 16)
