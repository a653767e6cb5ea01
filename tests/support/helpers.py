"""What the tests share: exact inputs, a paged pool built by formula, and a float64 judge.

Nothing here calls the package. The pool is filled element by element from the layouts'
definitions, so a mistake in the package's own packing can't hide, and the judge works on the dense
keys and values, so a mistake in reading a block table can't hide either. Whatever the pool doesn't
use (page tails, blocks nobody references) holds NaN, and tables carry ids that must never be
followed.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings

LAYOUTS = ("vllm", "HND", "NHD")
STAGE_NAMES = (
    "naive_loops",
    "batched_gather",
    "single_bmm",
    "gqa_broadcast",
    "single_tile",
    "fused_phase2",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN, INF = float("nan"), float("inf")
FP8_NAN = 0x7F  # in both formats
GARBAGE = (-1, 2**31 - 1, -7, 999_999, -(2**31))  # table entries nobody may follow

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


# -- inputs


def G(x: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/128 between -125/128 and 125/128: exact in float32, float16 and bfloat16."""
    return ((x * x + 3 * x) % 251 - 125).to(torch.float32) / 128


class Dense(NamedTuple):
    query: torch.Tensor  # (num_seqs, num_heads, head_size)
    keys: list[torch.Tensor]  # per sequence (tokens, num_kv_heads, head_size)
    values: list[torch.Tensor]


def generated(lens, num_heads, num_kv_heads, head_size, rows=None) -> Dense:
    """Q, K and V by formula; `rows`: which row of it each sequence is (default 0, 1, ...)."""
    d = torch.arange(head_size)
    h = torch.arange(num_heads)[:, None]
    g = torch.arange(num_kv_heads)[:, None]
    queries, keys, values = [], [], []
    for b, tokens in zip(range(len(lens)) if rows is None else rows, lens):
        t = torch.arange(tokens)[:, None, None]
        queries.append(G(53 * h + 19 * d + 101 * b + 7))
        keys.append(G(131 * t + 37 * g + 17 * d + 61 * b + 1))
        values.append(G(89 * t + 43 * g + 29 * d + 71 * b + 5))
    query = torch.stack(queries) if queries else torch.empty(0, num_heads, head_size)
    return Dense(query, keys, values)


def uniform(lens, num_heads=1, num_kv_heads=1, head_size=16) -> Dense:
    """q = 0, V[t] = t: out is the mean of the visible positions, lse the log of their number."""
    dense = generated(lens, num_heads, num_kv_heads, head_size)
    values = [
        torch.arange(s, dtype=torch.float32)[:, None, None].repeat(1, num_kv_heads, head_size)
        for s in lens
    ]
    return Dense(torch.zeros(len(lens), num_heads, head_size), dense.keys, values)


def random(lens, num_heads, num_kv_heads, head_size, *, seed=0, sharp=1.0, dtype=torch.float32):
    """Normal noise; `sharp` multiplies the keys, because a flat softmax hides mistakes."""
    rng = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=rng)

    return Dense(
        noise(len(lens), num_heads, head_size).to(dtype),
        [(sharp * noise(s, num_kv_heads, head_size)).to(dtype) for s in lens],
        [noise(s, num_kv_heads, head_size).to(dtype) for s in lens],
    )


# -- the pool


class Pool(NamedTuple):
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor


def lanes_per_chunk(dtype) -> int:
    """The vLLM layout's x: how many lanes fit 16 bytes."""
    return 16 // torch.empty(0, dtype=dtype).element_size()


def empty_caches(num_blocks, block_size, num_kv_heads, head_size, layout, dtype, device="cpu"):
    if layout == "vllm":
        x = lanes_per_chunk(dtype)
        assert head_size % x == 0, f"the vllm layout can't hold head size {head_size} in {dtype}"
        key_shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
        value_shape = (num_blocks, num_kv_heads, head_size, block_size)
    elif layout == "HND":
        key_shape = value_shape = (num_blocks, num_kv_heads, block_size, head_size)
    else:
        key_shape = value_shape = (num_blocks, block_size, num_kv_heads, head_size)
    key = torch.empty(key_shape, dtype=dtype, device=device)
    return key, torch.empty(value_shape, dtype=dtype, device=device)


def slots(layout, x, block, offset, head, lane):
    """The index of (block, offset, head, lane) in the key cache, and in the value cache."""
    if layout == "vllm":
        return (block, head, lane // x, offset, lane % x), (block, head, lane, offset)
    if layout == "HND":
        return ((block, head, offset, lane),) * 2
    return ((block, offset, head, lane),) * 2


def _positions(ids, tokens, block_size, num_kv_heads, head_size, device):
    t = torch.arange(tokens, device=device)
    ids = torch.as_tensor(ids, dtype=torch.int64, device=device)
    block = ids[t // block_size][:, None, None]  # (tokens, 1, 1)
    offset = (t % block_size)[:, None, None]
    head = torch.arange(num_kv_heads, device=device)[None, :, None]
    lane = torch.arange(head_size, device=device)[None, None, :]
    return block, offset, head, lane


def store(key_cache, value_cache, layout, block_size, ids, key, value):
    """Write a sequence's dense (tokens, num_kv_heads, head_size) into the blocks `ids`."""
    if key.shape[0] == 0:
        return
    where = _positions(ids, key.shape[0], block_size, key.shape[1], key.shape[2], key_cache.device)
    in_key, in_value = slots(layout, key_cache.shape[-1], *where)
    key_cache[in_key] = key.to(key_cache)
    value_cache[in_value] = value.to(value_cache)


def load(key_cache, value_cache, layout, block_size, ids, tokens, num_kv_heads, head_size):
    """Read a sequence back, dense."""
    where = _positions(ids, tokens, block_size, num_kv_heads, head_size, key_cache.device)
    in_key, in_value = slots(layout, key_cache.shape[-1], *where)
    shape = (tokens, num_kv_heads, head_size)
    return key_cache[in_key].reshape(shape), value_cache[in_value].reshape(shape)


def shuffled(count, seed) -> list[int]:
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return ids[::-1] if ids == sorted(ids) else ids


def paged(
    dense: Dense,
    block_size,
    layout,
    *,
    dtype=None,
    device="cpu",
    seed=0,
    spare=3,
    poison=(NAN, NAN),
    extra_columns=2,
    padding=GARBAGE,
    index_dtype=torch.int32,
    tables=None,
    num_blocks=None,
) -> Pool:
    """The dense tensors in a pool: shuffled blocks, `poison` = (K, V) wherever nothing lives."""
    keys, values = dense.keys, dense.values
    num_kv_heads, head_size = (keys[0].shape[1:]) if keys else (1, dense.query.shape[-1])
    dtype = dtype or (keys[0].dtype if keys else dense.query.dtype)
    counts = [-(-k.shape[0] // block_size) for k in keys]
    if tables is None:
        num_blocks = sum(counts) + spare if num_blocks is None else num_blocks
        ids = shuffled(num_blocks, seed)
        tables = [[ids.pop() for _ in range(n)] for n in counts]
    elif num_blocks is None:
        num_blocks = max((i for row in tables for i in row), default=-1) + 1 + spare
    key_cache, value_cache = empty_caches(
        num_blocks, block_size, num_kv_heads, head_size, layout, dtype, device
    )
    key_cache.fill_(poison[0])
    value_cache.fill_(poison[1])
    for row, key, value in zip(tables, keys, values):
        store(key_cache, value_cache, layout, block_size, row, key, value)
    columns = max(counts, default=0) + extra_columns
    padded = [
        list(row[:n]) + [padding[c % len(padding)] for c in range(columns - n)]
        for row, n in zip(tables, counts)
    ]
    block_tables = torch.tensor(padded, dtype=index_dtype, device=device)
    seq_lens = torch.tensor([k.shape[0] for k in keys], dtype=index_dtype, device=device)
    return Pool(key_cache, value_cache, block_tables.reshape(len(keys), columns), seq_lens)


def inside(tensor, dim):
    """The same values as every second element of a dimension of something poisoned; -1: as is."""
    if dim < 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = 2 * shape[dim] + 1
    fill = NAN if tensor.is_floating_point() else FP8_NAN if tensor.dtype == torch.uint8 else -9
    view = torch.full(shape, fill, dtype=tensor.dtype)[(slice(None),) * dim + (slice(1, None, 2),)]
    view.copy_(tensor)
    return view


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


def to(dense: Dense, dtype=None, device="cpu") -> Dense:
    """All of it in another dtype (None: as it is) and on another device."""

    def moved(tensor):
        return tensor.to(device=device, dtype=dtype or tensor.dtype)

    return Dense(moved(dense.query), [*map(moved, dense.keys)], [*map(moved, dense.values)])
