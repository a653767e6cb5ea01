"""Stands in for CoreX's kernels: right values in float32, from vLLM's caches, or from V2's.

CALLS: of each call its name, and of V2 also how many blocks it was given
"""

import torch

LONGEST = 32768  # tokens that the card's V1 serves. Above it hangs or fails
CALLS = []


def vllm_single_query_cached_kv_attention(
    out,
    query,
    key_cache,
    value_cache,
    head_mapping,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
    alibi_slopes,
):
    CALLS.append("v1")
    if max_seq_len > LONGEST:
        raise RuntimeError(f"no shared memory for the logits of {max_seq_len} tokens")
    keys = key_cache.permute(0, 1, 3, 2, 4).flatten(3)  # the whole pool, as a test may
    values = value_cache.transpose(2, 3)
    attend(out, query, keys, values, head_mapping, scale, block_tables, seq_lens, alibi_slopes)


def vllm_single_query_cached_kv_attention_v2(
    out,
    partition_size,
    exp_sums,
    max_logits,
    tmp_out,
    query,
    key_cache,
    value_cache,
    head_mapping,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
):
    CALLS.append(("v2", len(key_cache)))
    num_seqs, num_heads, head_size = query.shape
    partitions = -(-max_seq_len // partition_size)
    assert partition_size == 512
    assert exp_sums.shape == max_logits.shape == (num_seqs, num_heads, partitions)
    assert tmp_out.shape == (num_seqs, num_heads, partitions, head_size)
    assert key_cache.shape[2:] == value_cache.shape[2:] == (block_size, head_size)
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    assert key_cache.dtype == value_cache.dtype == query.dtype == out.dtype
    attend(out, query, key_cache, value_cache, head_mapping, scale, block_tables, seq_lens)


def vllm_cache_ops_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping):
    CALLS.append("reshape_and_cache")


@torch.autocast("cpu", enabled=False)
def attend(out, query, keys, values, head_mapping, scale, block_tables, seq_lens, slopes=None):
    """keys, values: (num_blocks, num_kv_heads, block_size, head_size)"""
    if not isinstance(head_mapping, torch.Tensor):
        raise TypeError("incompatible function arguments: head_mapping is no tensor")
    block_size = keys.shape[2]
    for seq, tokens in enumerate(seq_lens.tolist()):
        blocks = block_tables[seq, : -(-tokens // block_size)].long()
        for head, kv_head in enumerate(head_mapping.tolist()):
            key = keys[blocks, kv_head].flatten(0, 1)[:tokens].float()
            value = values[blocks, kv_head].flatten(0, 1)[:tokens].float()
            logits = key @ query[seq, head].float() * scale
            if slopes is not None:
                logits += slopes[head] * (torch.arange(tokens) - (tokens - 1))
            out[seq, head] = logits.softmax(0) @ value
