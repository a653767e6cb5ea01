"""Stands in for CoreX's vLLM 0.6.3: forward_decode has both branches and takes the first."""

import torch
from vllm import _custom_ops as ops


class PagedAttention:
    @staticmethod
    def forward_decode(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        max_seq_len,
        kv_cache_dtype,
        num_kv_heads,
        scale,
        alibi_slopes,
        k_scale,
        v_scale,
        tp_rank=0,
        blocksparse_local_blocks=0,
        blocksparse_vert_stride=0,
        blocksparse_block_size=64,
        blocksparse_head_sliding_step=0,
    ):
        if blocksparse_vert_stride is not None and blocksparse_vert_stride > 1:
            block_size = value_cache.size(-1)
            assert blocksparse_block_size % block_size == 0
        out = torch.empty_like(query)
        num_seqs, num_heads, head_size = query.shape
        partitions = (max_seq_len + 511) // 512
        use_v1 = max_seq_len <= 8192 and (partitions == 1 or num_seqs * num_heads > 512)
        use_v1 = True
        rest = [query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens]
        rest += [value_cache.shape[3], max_seq_len, alibi_slopes]
        if use_v1:
            ops.paged_attention_v1(out, *rest)
        else:
            exp_sums = torch.empty(num_seqs, num_heads, partitions)
            tmp_out = query.new_empty(num_seqs, num_heads, partitions, head_size)
            rest += [kv_cache_dtype, k_scale, v_scale]
            ops.paged_attention_v2(out, exp_sums, exp_sums.clone(), tmp_out, *rest)
        return out
