"""Stands in for a later state of CoreX's port: V1, and above what it serves PyTorch."""

import torch
from vllm import _custom_ops as ops


class PagedAttention:
    LONGEST = 32768
    GATHERED = []  # the lengths that PyTorch served

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
        longest = int(seq_lens.max()) if seq_lens.numel() else max_seq_len
        if longest > PagedAttention.LONGEST:
            tensors = query, key_cache, value_cache, block_tables, seq_lens
            return PagedAttention._gather(*tensors, scale)
        out = torch.empty_like(query)
        rest = [query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens]
        rest += [value_cache.shape[3], max_seq_len, alibi_slopes]
        use_v1 = True
        if use_v1:
            ops.paged_attention_v1(out, *rest)
        else:
            ops.paged_attention_v2(out, None, None, None, *rest, kv_cache_dtype, k_scale, v_scale)
        return out

    @staticmethod
    def _gather(query, key_cache, value_cache, block_tables, seq_lens, scale):
        out, block_size = torch.empty_like(query), value_cache.shape[3]
        for seq, tokens in enumerate(seq_lens.tolist()):
            PagedAttention.GATHERED.append(tokens)
            blocks = block_tables[seq, : -(-tokens // block_size)].long()
            keys = key_cache[blocks].permute(1, 2, 4, 0, 3).flatten(1, 2).flatten(2)
            values = value_cache[blocks].permute(1, 2, 0, 3).flatten(2)
            keys, values = keys[..., :tokens].float(), values[..., :tokens].float()
            grouped = query[seq].float().unflatten(0, (len(keys), -1))
            weights = (grouped @ keys * scale).softmax(-1)
            out[seq] = (weights @ values.transpose(1, 2)).flatten(0, 1)
        return out
