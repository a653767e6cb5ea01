"""Blocks of any layout, gathered as the float32 rows of a wave.

`index_select` copies rows. What a row of a cache is differs by layout. What arrives is the same:
(work item and KV head, token, lane).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .fp8 import widen
from .layouts import tokens_of
from .step import Step
from .transforms import is_traced
from .workspace import Buffer

# On tensors without data, torch 2.1's index_select resizes `out` to its source's shape. So on meta
# the source is given the shape of `out`, and under a tracer the result is copied into `out`.
_META_RESIZES_OUT = torch.__version__.startswith("2.1.")


class CacheRows(NamedTuple):
    """K or V of a pool as rows of one KV head each.

    A row is all of a block's tokens or, if these lie apart from one another, one token.
    """

    rows: Tensor  # (num_rows, block_size, lanes) or (num_rows, lanes), a view of the cache
    block_step: int  # rows from one block to the next
    offsets: Tensor  # (num_kv_heads, 1, rows of a block and head), from a block's first row


def cache_rows(
    step: Step, key_cache: Tensor, value_cache: Tensor, layout: str
) -> tuple[CacheRows, CacheRows]:
    """K and V as rows, which are views of the caches whatever their strides.

    Copied in the order (KV head, block, token), rows of any layout are tokens of head_size lanes.
    The transposition that "vllm" needs happens while its blocks are copied.
    """
    if layout == "vllm" and key_cache.is_cpu:
        key_cache = _in_pieces(key_cache)
    key, value = key_cache, value_cache
    if layout != "HND":  # where heads come first already
        key, value = (t.transpose(1, 2) for t in tokens_of(key_cache, value_cache, layout))
    buffers = step.buffers
    return _rows(step, key, buffers.key_offsets), _rows(step, value, buffers.value_offsets)


def _in_pieces(key_cache: Tensor) -> Tensor:
    """A "vllm" key with its x lanes, 16 bytes, as one element, which a CPU moves at once."""
    try:
        return key_cache.view(torch.complex128)
    except RuntimeError:  # it begins or is strided in steps that aren't whole pieces
        return key_cache


def _rows(step: Step, tokens: Tensor, buffer: Buffer) -> CacheRows:
    """Args: tokens: (num_blocks, num_kv_heads, block_size, ...), a view of a cache, not empty"""
    sizes, strides = tokens.shape, tokens.stride()
    apart = strides[-1] == 1 and strides[2] != sizes[-1] and sizes[2] > 1
    outer = 3 if apart else 2  # dimensions outside of a row
    steps = [strides[dim] if sizes[dim] > 1 else 0 for dim in range(outer)]
    row_stride = math.gcd(*steps) or 1
    steps = [step // row_stride for step in steps]
    num_rows = 1 + sum((n - 1) * step for n, step in zip(sizes, steps))
    rows = tokens.as_strided((num_rows, *sizes[outer:]), (row_stride, *strides[outer:]))
    # With one block only, its step is num_rows, so that any id but 0 leads outside of the rows.
    block_step = steps[0] if sizes[0] > 1 else num_rows
    return CacheRows(rows, block_step, _offsets(step, steps[1:], buffer))


def _offsets(step: Step, steps: list[int], buffer: Buffer) -> Tensor:
    """Rows from a block's first to that of each (KV head, token).

    Args:    steps: rows from one head to the next and, if a row is one token, to the next token
    """
    heads, slots = step.schedule.kv_head_ids, step.schedule.slot_offsets
    if steps == [1]:  # a block's rows are its heads
        return heads
    offsets = buffer(len(heads), 1, len(slots) if len(steps) > 1 else 1)
    torch.mul(heads.expand_as(offsets), steps[0], out=offsets)
    return offsets.add_(slots, alpha=steps[1]) if len(steps) > 1 else offsets


def gather(step: Step, cache: CacheRows, block_ids: Tensor, element_dtype: torch.dtype) -> Tensor:
    """K or V of a wave's blocks, in order.

    Args:    block_ids: (items, 1, blocks, 1), int64
             element_dtype: what the cache's elements are read as
    Returns: (items * num_kv_heads, width, lanes), float32
    Raises:  IndexError: from PyTorch on a CPU, for a block that isn't in the pool
    Cost:    reads and writes each byte once, and again where it converts
    """
    shape, buffers = step.schedule.shape, step.buffers
    num_items, _, num_blocks, _ = block_ids.shape
    row_ids = buffers.row_ids(num_items, shape.num_kv_heads, num_blocks, cache.offsets.shape[2])
    torch.add(cache.offsets, block_ids, alpha=cache.block_step, out=row_ids)  # 8 bytes a row
    row_ids = buffers.row_ids(row_ids.numel())
    matrices, width = num_items * shape.num_kv_heads, num_blocks * shape.block_size
    kv = buffers.kv(matrices, width, shape.lanes)
    if shape.needs_no_conversion:
        _select_rows(cache.rows, row_ids, buffers.kv)  # reads and writes the wave's K or V
        return kv
    # Converted by value while the wave is still in the processor's cache, because half-precision
    # matrix products are slow on most CPUs.
    raw = buffers.raw(matrices, width, shape.head_size)
    _select_rows(cache.rows, row_ids, buffers.raw)
    out = buffers.kv(matrices, width, shape.lanes, columns=shape.head_size)
    if shape.dtype.itemsize > 1:
        out.copy_(raw)  # reads raw, writes float32
    else:
        widen(raw, element_dtype, buffers.fp16_bits(*raw.shape), out)
    return kv


def _select_rows(rows: Tensor, row_ids: Tensor, out: Buffer) -> None:
    """rows[row_ids] into the buffer."""
    select(rows, row_ids, out(row_ids.numel(), *rows.shape[1:], dtype=rows.dtype))


def select(source: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """source[index] along the first dimension, into out."""
    if _META_RESIZES_OUT and is_traced(out):
        return out.copy_(torch.index_select(source, 0, index))
    if _META_RESIZES_OUT and out.is_meta:
        source = source[:1].expand_as(out)
    return torch.index_select(source, 0, index, out=out)
