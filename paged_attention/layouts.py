"""The three ways a paged KV cache lies in memory, and fetching blocks from each.

    "vllm"  key   (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
            value (num_blocks, num_kv_heads, head_size, block_size)
    "HND"   both  (num_blocks, num_kv_heads, block_size, head_size)
    "NHD"   both  (num_blocks, block_size, num_kv_heads, head_size)

vLLM splits a key's lanes into pieces of 16 bytes so that one GPU thread loads one piece of each
token; HND and NHD are FlashInfer's names for the two plain orders.
"""

import math
from typing import NamedTuple

import torch

LAYOUTS = ("vllm", "HND", "NHD")


class Geometry(NamedTuple):
    """The sizes of a cache, read from its tensors."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


def lanes_per_piece(dtype):
    """x of the "vllm" layout: how many elements of dtype 16 bytes hold."""
    return 16 // dtype.itemsize


def cache_shapes(geometry, layout, dtype):
    """(key shape, value shape) of a cache of this geometry.

    Raises:  ValueError: layout is unknown, or "vllm" and head_size is not a multiple of x
    """
    num_blocks, block_size, num_kv_heads, head_size = geometry
    if layout == "HND":
        shape = (num_blocks, num_kv_heads, block_size, head_size)
        return shape, shape
    if layout == "NHD":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return shape, shape
    if layout != "vllm":
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    x = lanes_per_piece(dtype)
    if head_size % x:
        raise ValueError(
            f'layout "vllm" needs a head_size that is a multiple of {x} for {dtype} '
            f"(16 bytes), got head_size {head_size}; use HND or NHD"
        )
    return (
        (num_blocks, num_kv_heads, head_size // x, block_size, x),
        (num_blocks, num_kv_heads, head_size, block_size),
    )


def tokens_of(key_cache, value_cache, layout):
    """Both caches with a token's position in front, as views.

    Returns: key: (num_blocks, block_size, num_kv_heads, head_size), or for "vllm" the lanes in
                  their pieces, (num_blocks, block_size, num_kv_heads, head_size/x, x)
             value: (num_blocks, block_size, num_kv_heads, head_size)
    """
    if layout == "NHD":
        return key_cache, value_cache
    if layout == "HND":
        return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    return key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)


def pack(key, value, layout):
    """Blocks of plain keys and values, laid out as a cache.

    Args:    key, value: (num_blocks, block_size, num_kv_heads, head_size), same dtype
             layout: "vllm", "HND" or "NHD"
    Returns: (key_cache, value_cache), contiguous, freshly allocated; `unpack` gives the same
             bits back
    Raises:  ValueError: as cache_shapes
    """
    geometry = Geometry(*key.shape)
    key_shape, value_shape = cache_shapes(geometry, layout, key.dtype)
    caches = key.new_empty(key_shape), value.new_empty(value_shape)
    key_tokens, value_tokens = tokens_of(*caches, layout)
    key_tokens.copy_(key.reshape(key_tokens.shape))
    value_tokens.copy_(value)
    return caches


def unpack(key_cache, value_cache, layout):
    """The inverse of `pack`: (key, value), each (num_blocks, block_size, num_kv_heads, head_size),
    copies or views as the layout allows."""
    key, value = tokens_of(key_cache, value_cache, layout)
    return key.flatten(3), value


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
