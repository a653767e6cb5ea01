"""Phase 1: a wave of partitions -> one state per partition, into buffers that are reused."""

from typing import NamedTuple

import torch

from .mask import adjust
from .phase2 import LOWEST, batched_gemm


class WaveBuffers(NamedTuple):
    """Where a wave's queries are, and where its intermediates go. Items are pairs of work item and
    KV head, in this order: the matrices of one batched GEMM. Their rows are pairs of query head
    and query token."""

    seq_query: torch.Tensor  # (work items, all rows, head_size), float32, already scaled
    query: torch.Tensor  # the same, (items, rows, head_size)
    raw: torch.Tensor | None  # like kv, as the caches hold it if that isn't float32
    half: torch.Tensor | None  # like kv, int16, if raw is bytes
    kv: torch.Tensor  # (items, width, aligned(head_size)), first K, then V
    logits: torch.Tensor  # (items, rows, width), at least two matrices
    by_head: tuple  # the logits' other shape, (work items, num_heads, q_len, width)
    m: torch.Tensor  # (items, rows, 1)
    s: torch.Tensor  # like m, at least two matrices
    acc: torch.Tensor  # (items, rows, aligned(head_size)), at least two matrices


def wave_states(key, value, mask, softcap, slopes, ones, buffers):
    """Reduce equally wide partitions, each on its own.

    The rows that share a KV head, of its query heads and of several query tokens, are the rows of
    one matrix, so K and V are used as they were gathered, never expanded.

    Args:    key, value: functions that gather (items, width, aligned(head_size)), float32; value
                   is called when key's result is no longer needed, so both may use the same memory
             mask: what the rows see: what a slot holds that none sees, NaN included, is no matter
             softcap, slopes: as mask.adjust
             ones: (width, 1)
    Returns: acc, s and m in the buffers, (items, rows, aligned(head_size) or 1)
    """
    k = key()[..., : buffers.query.shape[-1]]  # (items, width, head_size)
    # Each (items, rows, width):
    logits = batched_gemm(buffers.query, k.transpose(1, 2), buffers.logits)
    adjust(logits.view(buffers.by_head), mask, softcap, slopes)
    # No larger than LOWEST where all logits are -inf: their exp is 0 then, not NaN.
    m = torch.amax(logits, -1, keepdim=True, out=buffers.m).clamp_(min=LOWEST)
    weights = logits.sub_(m).exp_()
    s = batched_gemm(weights, ones.expand(len(weights), -1, -1), buffers.s)  # (items, rows, 1)
    v = value()  # (items, width, aligned(head_size))
    if mask.dead is not None:
        last = v.unflatten(0, (len(mask.dead), -1))[:, :, -mask.dead.shape[1] :]
        last.masked_fill_(mask.dead[:, None, :, None], 0.0)  # 0 times NaN is NaN
    acc = batched_gemm(weights, v, buffers.acc)  # (items, rows, aligned(head_size))
    return acc, s, m
