"""Exact inputs, and a paged pool that is built by formula.

Nothing here calls the package. The pool is filled element by element from the layouts'
definitions, so a mistake in the package's own packing can't hide. Whatever the pool doesn't use
(page tails, blocks nobody references) holds NaN, and tables carry ids that must never be followed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LAYOUTS = ("vllm", "HND", "NHD")
NAN, INF = float("nan"), float("inf")
FP8_NAN = 0x7F  # in both formats
GARBAGE = (-1, 2**31 - 1, -7, 999_999, -(2**31))  # table entries nobody may follow

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


def to(dense: Dense, dtype=None, device="cpu") -> Dense:
    """All of it in another dtype (None: as it is) and on another device."""

    def moved(tensor):
        return tensor.to(device=device, dtype=dtype or tensor.dtype)

    return Dense(moved(dense.query), [*map(moved, dense.keys)], [*map(moved, dense.values)])
