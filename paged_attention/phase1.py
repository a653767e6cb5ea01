"""Phase 1: a wave of partitions -> one state per partition, into buffers that are reused."""

from typing import NamedTuple

import torch

from .phase2 import LOWEST, batched_gemm


class WaveBuffers(NamedTuple):
    """Where a wave's queries are, and where its intermediates go. Items are pairs of work item and
    KV head, in this order: the matrices of one batched GEMM."""

    seq_query: torch.Tensor  # (work items, num_heads, head_size), float32, already scaled
    query: torch.Tensor  # the same, (items, num_queries_per_kv, head_size)
    raw: torch.Tensor | None  # like kv, in the caches' dtype if that isn't float32
    kv: torch.Tensor  # (items, width, head_size), first K, then V
    logits: torch.Tensor  # (items, num_queries_per_kv, width), at least two matrices
    m: torch.Tensor  # (items, num_queries_per_kv, 1)
    s: torch.Tensor  # like m, at least two matrices
    acc: torch.Tensor  # (items, num_queries_per_kv, head_size), at least two matrices


def wave_states(key, value, dead, ones, buffers):
    """Reduce equally wide partitions, each on its own.

    The query heads that share a KV head are the rows of one matrix, so K and V are used as they
    were gathered, never expanded.

    Args:    key, value: functions that gather (items, width, head_size), float32; value is called
                   when key's result is no longer needed, so both may use the same memory
             dead: None, or (work items, n), for the last n slots of each item: True where a slot
                   isn't the sequence's own, and what it holds, NaN included, is no matter
             ones: (width, 1)
    Returns: acc, s and m in the buffers, (items, num_queries_per_kv, head_size or 1)
    """
    k = key()  # (items, width, head_size)
    # Each (items, num_queries_per_kv, width):
    logits = batched_gemm(buffers.query, k.transpose(1, 2), buffers.logits)
    if dead is not None:
        last = _by_work_item(logits, dead)[..., -dead.shape[1] :]
        last.masked_fill_(dead[:, None, None], -torch.inf)
    # No larger than LOWEST where all logits are -inf: their exp is 0 then, not NaN.
    m = torch.amax(logits, -1, keepdim=True, out=buffers.m).clamp_(min=LOWEST)
    weights = logits.sub_(m).exp_()
    s = batched_gemm(weights, ones.expand(len(weights), -1, -1), buffers.s)  # (items, group, 1)
    v = value()  # (items, width, head_size)
    if dead is not None:
        last = _by_work_item(v, dead)[:, :, -dead.shape[1] :]
        last.masked_fill_(dead[:, None, :, None], 0.0)  # 0 times NaN is NaN
    acc = batched_gemm(weights, v, buffers.acc)  # (items, group, head_size)
    return acc, s, m


def _by_work_item(matrices, dead):
    """(items, ...) -> (work items, num_kv_heads, ...), a view"""
    return matrices.view(len(dead), -1, *matrices.shape[1:])
