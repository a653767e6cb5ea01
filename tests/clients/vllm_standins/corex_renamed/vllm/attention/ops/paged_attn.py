"""Stands in for the last state of CoreX's port: num_kv_heads is called head_mapping, and above
what V1 serves the vendor's V2 gets the whole pool, permuted."""

import ixformer.functions as ixf
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
        head_mapping,
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
        longest = int(seq_lens.max()) if seq_lens.numel() else max_seq_len
        if longest > max_seq_len:
            seq_lens = seq_lens.clamp(max=max_seq_len)
        out, block_size = torch.empty_like(query), value_cache.shape[3]
        num_seqs, num_heads, head_size = query.shape
        partitions = (max_seq_len + 511) // 512
        if longest > 32768:
            keys = key_cache.permute(0, 1, 3, 2, 4).contiguous().flatten(3)
            values = value_cache.permute(0, 1, 3, 2).contiguous()
            exp_sums = torch.empty(num_seqs, num_heads, partitions)
            tmp_out = query.new_empty(num_seqs, num_heads, partitions, head_size)
            scratch = exp_sums, exp_sums.clone(), tmp_out
            rest = head_mapping, scale, block_tables, seq_lens, block_size, max_seq_len
            ixf.vllm_single_query_cached_kv_attention_v2(
                out, 512, *scratch, query, keys, values, *rest
            )
            return out
        use_v1 = partitions == 1 or num_seqs * num_heads >= 6
        if use_v1:
            rest = head_mapping, scale, block_tables, seq_lens, block_size, max_seq_len
            ops.paged_attention_v1(out, query, key_cache, value_cache, *rest, alibi_slopes)
        return out
