"""Blocks of any layout, fetched as the float32 rows of a wave.

A cache is seen as rows that `index_select` copies; what a row is differs by layout, what arrives
doesn't: (work item and KV head, token, lane).
"""

import math
from typing import NamedTuple

import torch

from paged_attention.kernel.fp8 import widen
from paged_attention.kernel.layouts import tokens_of


class Rows(NamedTuple):
    """A cache as rows that `index_select` copies one by one, each of one KV head.

    A row is a block's tokens or, where a block's tokens lie apart, one token.
    """

    tensor: torch.Tensor  # (num_rows, block_size, lanes) or (num_rows, lanes), a view of the cache
    block_step: int  # rows from one block to the next
    head_step: int  # rows from one KV head to the next
    token_step: int | None  # rows from one token to the next; None: a row is a block's tokens


def rows_of(key_cache, value_cache, layout):
    """Both caches as Rows, views of them whatever their strides.

    Copied in the order (KV head, block, token), rows of any layout are tokens of head_size lanes:
    the transposition that "vllm" needs happens as its blocks are copied.
    """
    if layout == "vllm" and key_cache.device.type == "cpu":
        key_cache = _in_pieces(key_cache)
    key, value = tokens_of(key_cache, value_cache, layout)
    return _rows(key.transpose(1, 2)), _rows(value.transpose(1, 2))


def _in_pieces(key_cache):
    """A "vllm" key with its x lanes, 16 bytes, as one element: a CPU moves them as one."""
    try:
        return key_cache.view(torch.complex128)
    except RuntimeError:  # it begins or is strided in steps that aren't whole pieces
        return key_cache


def _rows(tokens):
    """Args: tokens: (num_blocks, num_kv_heads, block_size, ...), a view of a cache, not empty"""
    sizes, strides = tokens.shape, tokens.stride()
    apart = strides[-1] == 1 and strides[2] != sizes[-1] and sizes[2] > 1
    steps = [strides[dim] if sizes[dim] > 1 else 0 for dim in range(3 if apart else 2)]
    row_stride = math.gcd(*steps) or 1
    steps = [step // row_stride for step in steps]
    num_rows = 1 + sum((n - 1) * step for n, step in zip(sizes, steps))
    inside = len(steps)
    rows = tokens.as_strided((num_rows, *sizes[inside:]), (row_stride, *strides[inside:]))
    return Rows(rows, steps[0], steps[1], steps[2] if apart else None)


def row_offsets(rows, heads, tokens, out):
    """Rows from a block's first to that of (KV head, token).

    Args:    heads: (num_kv_heads, 1, 1), 0, 1, 2, ...;  tokens: (block_size,), 0, 1, 2, ...
             out: a function of a shape that gives a buffer, int64
    Returns: (num_kv_heads, 1, block_size), or (num_kv_heads, 1, 1) where rows are blocks
    """
    num_tokens = 1 if rows.token_step is None else len(tokens)
    if num_tokens == 1 and rows.head_step == 1:
        return heads
    offsets = out(len(heads), 1, num_tokens)
    torch.mul(heads.expand_as(offsets), rows.head_step, out=offsets)
    return offsets if num_tokens == 1 else offsets.add_(tokens, alpha=rows.token_step)


def gather(rows, row_ids, out):
    """Copy rows, in order.

    Args:    row_ids: (n,), int64
             out: as many elements as n rows have, contiguous, the cache's dtype
    Returns: out
    Raises:  IndexError: from PyTorch on a CPU, for a row that isn't in the cache (never wraps)
    Cost:    reads and writes each byte once
    """
    shape, flat = rows.tensor.shape[1:], out.view(-1).view(rows.tensor.dtype)
    select(rows.tensor, row_ids, flat.view(row_ids.numel(), *shape))
    return out


def select(source, index, out):
    """source[index] along the first dimension, into out."""
    # On meta torch 2.1's index_select would resize out; without values, any copy does.
    if out.is_meta:
        return out.copy_(source[:1].expand_as(out))
    return torch.index_select(source, 0, index, out=out)


def fetch(heads, rows, offsets, block_ids, meaning, views):
    """(items, width, lanes), float32: the wave's blocks, in order, read as dtype meaning."""
    num_items, _, num_blocks, _ = block_ids.shape
    row_ids = views("row_ids", num_items, heads.num_kv_heads, num_blocks, offsets.shape[2])
    torch.add(offsets, block_ids, alpha=rows.block_step, out=row_ids)
    shape = num_items * heads.num_kv_heads, num_blocks * heads.block_size
    kv = views("kv", *shape, heads.lanes)
    if heads.as_stored:
        return gather(rows, row_ids.view(-1), kv)
    # By value, while the wave is still in the cache: half-precision GEMMs are slow on most CPUs.
    raw = gather(rows, row_ids.view(-1), views("raw", *shape, heads.head_size))
    out = kv[..., : heads.head_size]
    if heads.dtype.itemsize > 1:
        out.copy_(raw)
    else:
        widen(raw, meaning, views("half", *raw.shape), out)
    return kv
