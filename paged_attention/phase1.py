"""Phase 1: a wave of partitions of one sequence -> one state per partition."""

import torch

from .phase2 import State, finite


def partition_states(query, key, value, num_partitions):
    """Reduce equally wide partitions, each on its own.

    The query heads that share a KV head are the rows of one matrix, so K and V are used as they
    were gathered, never expanded.

    Args:    query: (num_kv_heads, num_queries_per_kv, head_size), float32, already scaled
             key, value: (num_kv_heads, num_partitions * width, head_size), every token live;
                   fp32/fp16/bf16, converted to float32 here
    Returns: State with acc (num_partitions, num_heads, head_size), s and m
             (num_partitions, num_heads), float32
    Cost:    2 GEMMs; reads key and value once each, and once more to convert
    """
    num_kv_heads, group, head_size = query.shape
    num_heads = num_kv_heads * group
    width = key.shape[1] // num_partitions

    logits = torch.bmm(query, key.float().transpose(1, 2))  # (num_kv_heads, group, tokens)
    logits = logits.view(num_kv_heads, group, num_partitions, width)
    m = logits.amax(dim=-1, keepdim=True)  # (num_kv_heads, group, num_partitions, 1)
    weights = torch.exp(logits - finite(m))
    s = weights.sum(dim=-1)  # (num_kv_heads, group, num_partitions)
    acc = torch.bmm(  # (num_kv_heads * num_partitions, group, head_size)
        weights.transpose(1, 2).reshape(num_kv_heads * num_partitions, group, width),
        value.float().reshape(num_kv_heads * num_partitions, width, head_size),
    ).view(num_kv_heads, num_partitions, group, head_size)

    def by_partition(x):
        # (num_kv_heads, num_partitions, group, ...) -> (num_partitions, num_heads, ...)
        return x.transpose(0, 1).reshape(num_partitions, num_heads, *x.shape[3:])

    return State(
        by_partition(acc),
        by_partition(s.transpose(1, 2)),
        by_partition(m.squeeze(-1).transpose(1, 2)),
    )
