"""Stands in for upstream's: each name calls a PyTorch operation, which may not be registered."""

import torch


def paged_attention_v1(
    out,
    query,
    key_cache,
    value_cache,
    num_kv_heads,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
    alibi_slopes,
    kv_cache_dtype,
    k_scale,
    v_scale,
    tp_rank=0,
    blocksparse_local_blocks=0,
    blocksparse_vert_stride=0,
    blocksparse_block_size=64,
    blocksparse_head_sliding_step=0,
):
    given = list(locals().values())
    torch.ops._C.paged_attention_v1(*given)


def paged_attention_v2(
    out,
    exp_sum,
    max_logits,
    tmp_out,
    query,
    key_cache,
    value_cache,
    num_kv_heads,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
    alibi_slopes,
    kv_cache_dtype,
    k_scale,
    v_scale,
    tp_rank=0,
    blocksparse_local_blocks=0,
    blocksparse_vert_stride=0,
    blocksparse_block_size=64,
    blocksparse_head_sliding_step=0,
):
    given = list(locals().values())
    torch.ops._C.paged_attention_v2(*given)


def reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    given = list(locals().values())
    torch.ops._C_cache_ops.reshape_and_cache(*given)
