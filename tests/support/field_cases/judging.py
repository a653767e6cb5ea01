"""Running a row: every answer its path gives, compared, and the comparisons counted.

A row that judged nothing did not run, so each case says how many results it judges at least.
"""

from __future__ import annotations

import functools
import inspect

import helpers
import pytest
import torch
from helpers import DTYPES, NAN, STAGE_NAMES, to
from ways import PLANS, block_size_of, second_run, way

from paged_attention import paged_attention, reference_attention
from paged_attention.stages import STAGES

from .rows import rows_of

JUDGED: dict[tuple, int] = {}  # row -> how many results it judged


class Judge:
    """Compares, and counts its comparisons."""

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
        def one_row(layout, path, device):
            judge = Judge(device)
            test(judge, layout, path)
            assert judge.count >= least, f"judged {judge.count} results, expected {least}"
            JUDGED[number, layout, path, device] = judge.count

        one_row.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in ("layout", "path", "device")
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


def answers(path, query, pool, layout, *, sizes=None, capacity=None, **options):
    """Every answer this path gives: (out, lse), lse None where the path has none.

    sizes: partition sizes, for paths that run with several;  capacity: of a capacity plan
    """
    options.setdefault("scale", 1.0)
    call, block_size = (query, *pool[:4]), block_size_of(pool, layout)
    longest = max([1, *pool.seq_lens.tolist()])
    own = {"single tile": longest, "P=bs": block_size, "P=4bs": 4 * block_size, "default": None}
    if path in STAGE_NAMES:
        for size in sizes or (longest, block_size, 4 * block_size):
            yield STAGES[path](*call, options["scale"], partition_size=size), None
    elif path == "reference":
        yield reference_attention(*call, layout=layout, **options)
    elif path in PLANS:
        for size in sizes or (block_size, 4 * block_size, None):
            window = options.pop("window", None)
            run = way(path, query, pool, layout, size, capacity, window)
            yield second_run(run, call, **options)
            options["window"] = window
    else:
        options.update(layout=layout, partition_size=own[path] if path in own else int(path[2:]))
        yield paged_attention(*call, return_lse=True, **options)
        out = torch.full_like(query, NAN)  # what the caller's buffer held before must not matter
        given = paged_attention(*call, out=out, **options)
        assert given.data_ptr() == out.data_ptr()
        yield out, None


def check(judge, path, layout, dense, pool, out, lse=None, *, extra=0.0, **more):
    """All of a path's answers against the right out and lse; returns the outputs."""
    outs = []
    for got, got_lse in answers(path, dense.query, pool, layout, **more):
        judge.close(got, out, dtype=dense.query.dtype, extra=extra)
        if lse is not None and got_lse is not None:
            judge.close(got_lse, lse, dtype=torch.float32, extra=extra, what="lse")
        outs.append(got)
    return outs


def each_dtype(dense, device):
    """The same numbers in float32, and in the shorter dtypes that can hold them all."""
    numbers = [dense.query, *dense.keys, *dense.values]
    for dtype in DTYPES:
        if all(torch.equal(x.to(dtype).float(), x.float()) for x in numbers):
            yield to(dense, dtype, device)
