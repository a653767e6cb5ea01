"""Everything at once against the float64 reference: all options, layouts, dtypes, plans, strides.

A short look in each run, with the same examples each time; `make fuzz` looks for some ten minutes
and elsewhere every time.
"""

from __future__ import annotations

import pytest
import torch
from helpers import ATOL, in_each_layout
from hypothesis import given, note, settings
from hypothesis import strategies as st
from pools import INF, NAN, Pool
from problems import problems
from ways import WAYS, second_run, way

from paged_attention import reference_attention

EPSILON = torch.finfo(torch.float32).eps


def bytes_of(tensor):
    return tensor if tensor.itemsize > 1 else tensor.view(torch.uint8)


def blank_out(problem):
    """`out` full of NaN, and what it lies in: the tensor itself, or one with gaps."""
    shape = problem.inputs[0].shape
    if not problem.out_strided:
        out = torch.full(shape, NAN, dtype=problem.out_dtype)
        return out, out
    wide = torch.full((*shape[:-1], 2, shape[-1] + 3), NAN, dtype=problem.out_dtype)
    return wide[..., 1, 2 : 2 + shape[-1]], wide


def answer(problem, kind):
    """(out, lse) of one kind of call, its `out` and its workspace full of NaN."""
    sizes = problem.partition_size, problem.max_seq_len if kind == "capacity" else None
    pool = Pool(*problem.inputs[1:])
    run = way(kind, problem.inputs[0], pool, problem.layout, *sizes, problem.window)
    checks = problem.checks if kind == "paged_attention" else {}
    out, around = blank_out(problem)
    out, lse = second_run(run, problem.inputs, out, **problem.options, **checks)
    if around is not out:
        gaps = around.numel() - out.numel()
        assert around.isnan().sum() == gaps + out.isnan().sum(), "wrote outside `out`"
    return out, lse


def judge(problem, out, lse, right, right_lse):
    """Within the dtype's tolerance, relative to the values, and what float32 makes of a logit."""
    assert not out.isnan().any() and not lse.isnan().any(), "NaN"
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:-1]
    unseen = right_lse == -INF
    assert torch.equal(lse == -INF, unseen), "another row sees nothing"
    assert (out[(right == 0).all(-1)] == 0).all(), "not exactly 0"
    for seq, (value, logit) in enumerate(zip(problem.values, problem.logits)):
        loose = EPSILON * logit
        bound = (ATOL[out.dtype] + loose) * max(1.0, value)
        error = (out[seq].double() - right[seq]).abs().max().item()
        assert error <= bound, f"out[{seq}]: off by {error:.3g}, allowed {bound:.3g}"
        seen = ~unseen[seq]
        error = (lse[seq].double() - right_lse[seq])[seen].abs()
        bound = ATOL[torch.float32] * right_lse[seq][seen].abs().clamp_min(1.0) + loose
        assert (error <= bound).all(), f"lse[{seq}]: off by {(error - bound).max():.3g} too much"


@in_each_layout
@pytest.mark.parametrize("kind", ["float32", "half", "fp8"])
@settings(max_examples=2 * settings().max_examples)
@given(data=st.data())
def test_everything_at_once_agrees_with_float64(layout, kind, data):
    problem = data.draw(problems(layout, kind))
    note(repr(problem.notes))
    before = [bytes_of(t).clone() for t in problem.inputs]
    right, right_lse = reference_attention(
        *problem.inputs, layout=layout, window=problem.window, **problem.options
    )
    for call in WAYS:
        note(call)
        judge(problem, *answer(problem, call), right, right_lse)
    for tensor, copy in zip(problem.inputs, before):
        now = bytes_of(tensor)
        assert ((now == copy) | (copy != copy)).all(), "an input was written to"
