"""What the tests share: rows to run a test for, a float64 judge, and comparisons.

Nothing here calls the package. The judge works on the dense keys and values, so a mistake in
reading a block table can't hide.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from pools import INF, LAYOUTS, Dense

STAGE_NAMES = (
    "naive_loops",
    "batched_gather",
    "single_bmm",
    "gqa_broadcast",
    "single_tile",
    "fused_phase2",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
DEVICES = ("cpu", cuda)
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def pairwise(**choices):
    """Run a test for rows of choices in which any two values stand together at least once.

    These are far fewer rows than all combinations, and notice nearly as much, because a fault
    that takes three values at once is rare. The test is given `row`, a dictionary.
    """
    every = list(itertools.product(*choices.values()))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in every}
    missing, rows = set().union(*pairs.values()), []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[rows[-1]]
    ids = ["-".join(str(value).removeprefix("torch.") for value in row) for row in rows]
    return pytest.mark.parametrize("row", [dict(zip(choices, row)) for row in rows], ids=ids)


# The same examples on every run, so that a red run can be repeated; HYPOTHESIS_PROFILE=explore
# looks further and differently each time.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=list(HealthCheck)
)
settings.register_profile(  # `make fuzz`: some ten minutes of the differential test on 2 cores
    "fuzz",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# -- the judge


def oracle(
    query,
    keys,
    values,
    scale=None,
    *,
    slopes=None,
    window=None,
    softcap=None,
    sinks=None,
    causal=True,
):
    """(out, lse) in float64 from dense keys and values: one head, one row at a time."""
    rows = query if query.dim() == 4 else query[:, None]
    num_seqs, q_len, num_heads, head_size = rows.shape
    out = torch.zeros(rows.shape, dtype=torch.float64)
    lse = torch.full(rows.shape[:-1], -INF, dtype=torch.float64)
    scale = head_size**-0.5 if scale is None else scale
    for b in range(num_seqs):
        tokens, num_kv_heads, _ = keys[b].shape
        key, value = keys[b].cpu().double(), values[b].cpu().double()
        t = torch.arange(tokens)
        for i in range(q_len):
            position = tokens - q_len + i
            seen = t <= position if causal else t >= 0
            if window is not None:
                seen = seen & (t > position - window)
            for h in range(num_heads):
                g = h // (num_heads // num_kv_heads)
                logits = key[seen, g] @ rows[b, i, h].cpu().double() * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if slopes is not None:
                    logits = logits + float(slopes[h]) * (t[seen] - position).double()
                sink = -INF if sinks is None else float(sinks[h])
                top = max([sink, *logits.tolist()])
                if top == -INF:
                    continue
                weights = torch.exp(logits - top)
                total = weights.sum().item() + math.exp(sink - top)
                out[b, i, h] = weights @ value[seen, g] / total
                lse[b, i, h] = top + math.log(total)
    return (out, lse) if query.dim() == 4 else (out[:, 0], lse[:, 0])


ATOL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rounding(dense: Dense, scale=None, slopes=None) -> float:
    """What float32 may lose over and above the usual 2e-6 where the logits are large.

    A logit is a dot product; its error grows with sum |q k| and moves the weights by as much. So
    does a bias of slope times distance.
    """
    scale = dense.query.shape[-1] ** -0.5 if scale is None else abs(scale)
    query = dense.query if dense.query.dim() == 3 else dense.query.transpose(1, 2).flatten(1, 2)
    steepest = 0.0 if slopes is None else slopes.abs().max().item()
    worst = 0.0
    for b, (key, value) in enumerate(zip(dense.keys, dense.values)):
        if key.numel() == 0 or query.numel() == 0:
            continue
        group = query.shape[1] // key.shape[1]
        q = query[b].double().abs().unflatten(0, (key.shape[1], group))
        logits = torch.einsum("gnd,tgd->gnt", q, key.double().abs()) * scale
        largest = logits.max().item() + steepest * key.shape[0]
        worst = max(worst, largest * max(1.0, value.double().abs().max().item()))
    return 4 * 2**-24 * worst


def assert_close(actual, expected, *, dtype=None, extra=0.0, what="out"):
    """Within the dtype's tolerance (times the value where that is above 1); -inf exact; no NaN."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    got = actual.detach().cpu().double()
    assert got.shape == expected.shape or expected.dim() == 0, (got.shape, expected.shape)
    expected = expected.expand(got.shape)
    assert not torch.isnan(got).any(), f"{what} holds NaN"
    infinite = torch.isinf(expected)
    assert torch.equal(torch.isinf(got), infinite), f"{what}: infinite where it shouldn't be"
    assert torch.equal(got[infinite], expected[infinite])
    error = (got - expected)[~infinite].abs()
    bound = (ATOL[dtype or actual.dtype] + extra) * expected[~infinite].abs().clamp_min(1.0)
    worst = (error - bound).max().item() if error.numel() else -1.0
    assert worst <= 0, f"{what}: off by {error.max().item():.3g}, {worst:.3g} more than allowed"


def assert_same(actual, expected, what="out"):
    """Not a bit apart (0 and -0 aside), NaN where NaN is."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    assert same.all(), f"{what}: not bitwise equal"
