"""Phase 1: a wave of partitions -> one state per partition, into memory that is reused."""

import torch

from .mask import adjust
from .phase2 import LOWEST, batched_gemm


def wave_states(query, key, value, mask, softcap, slopes, ones, views):
    """Reduce equally wide partitions, each on its own.

    An item is a pair of work item and KV head, in this order: one matrix of a batched GEMM. Its
    rows are the query heads that share the KV head, and of each of them the query tokens, so K and
    V are used as they were gathered, never expanded.

    Args:    query: (items, rows, head_size), float32, already scaled
             key, value: functions that gather (items, width, aligned(head_size)), float32; value
                   is called when key's result is no longer needed, so both may use the same memory
             mask: what the rows see: what a slot holds that none sees, NaN included, is no matter
             softcap, slopes: as mask.adjust
             ones: (width, 1)
             views: of the schedule's buffers
    Returns: acc, s and m, (items, rows, aligned(head_size) or 1)
    """
    items, rows, head_size = query.shape
    room, width = max(2, items), ones.shape[0]  # batched_gemm wants room for two
    k = key()[..., :head_size]  # (items, width, head_size)
    # Each (items, rows, width):
    logits = batched_gemm(query, k.transpose(1, 2), views("logits", room, rows, width))
    adjust(logits, mask, softcap, slopes)
    # No larger than LOWEST where all logits are -inf: their exp is 0 then, not NaN.
    m = torch.amax(logits, -1, keepdim=True, out=views("wave_m", items, rows, 1))
    weights = logits.sub_(m.clamp_(min=LOWEST)).exp_()
    s = batched_gemm(weights, ones.expand(items, -1, -1), views("wave_s", room, rows, 1))
    v = value()  # (items, width, aligned(head_size))
    if mask.dead is not None:
        # 0 times NaN is NaN. A CPU masks element by element: the fewer, the faster.
        wide = v.view(torch.complex128) if v.is_cpu else v
        last = wide.unflatten(0, (len(mask.dead), -1))[:, :, -mask.dead.shape[1] :]
        last.masked_fill_(mask.dead[:, None, :, None], 0.0)
    acc = batched_gemm(weights, v, views("wave_acc", room, rows, v.shape[2]))
    return acc, s, m
