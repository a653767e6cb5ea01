"""Stage 2, batched gather: one indexing operation fetches every block of a sequence.

The loop over blocks goes, and with it the host reads of block ids: the table row itself is the
index. Phase 1 still walks the partitions, now with `bmm` instead of `einsum`.
"""

import torch


def batched_gather(
    query, key_cache, value_cache, block_tables, seq_lens, scale, partition_size=512
):
    num_seqs, num_heads, head_size = query.shape
    _, num_kv_heads, _, block_size = value_cache.shape
    num_queries_per_kv = num_heads // num_kv_heads
    partition_size = -(-partition_size // block_size) * block_size  # whole blocks

    out = torch.zeros_like(query)
    for seq in range(num_seqs):
        seq_len = int(seq_lens[seq])
        if seq_len == 0:
            continue  # an empty sequence attends to nothing: its row stays 0
        num_blocks = -(-seq_len // block_size)
        num_partitions = -(-seq_len // partition_size)
        q = (query[seq].float() * scale).unsqueeze(1)  # (num_heads, 1, head_size)

        # Fetch the sequence: all of its blocks at once.
        block_ids = block_tables[seq, :num_blocks].long()
        k = key_cache[block_ids].permute(1, 0, 3, 2, 4)
        k = k.reshape(num_kv_heads, -1, head_size)  # (num_kv_heads, slots, head_size)
        v = value_cache[block_ids].permute(1, 0, 3, 2)
        v = v.reshape(num_kv_heads, -1, head_size)  # (num_kv_heads, slots, head_size)

        # Phase 1: one partition at a time, heads repeated: each query head has its own K and V.
        max_logits, exp_sums, partials = [], [], []
        for p in range(num_partitions):
            tokens = slice(p * partition_size, min((p + 1) * partition_size, seq_len))
            k_p = k[:, tokens].float().repeat_interleave(num_queries_per_kv, dim=0)
            v_p = v[:, tokens].float().repeat_interleave(num_queries_per_kv, dim=0)
            logits = torch.bmm(q, k_p.transpose(1, 2)).squeeze(1)  # (num_heads, tokens)
            m = logits.amax(dim=-1, keepdim=True)  # (num_heads, 1)
            weights = torch.exp(logits - m)
            s = weights.sum(dim=-1, keepdim=True)
            max_logits.append(m)
            exp_sums.append(s)
            partials.append(torch.bmm((weights / s).unsqueeze(1), v_p).squeeze(1))

        # Phase 2: bring the partitions to one common maximum, then average them.
        m = torch.cat(max_logits, dim=-1)  # (num_heads, num_partitions)
        s = torch.cat(exp_sums, dim=-1)
        partial_out = torch.stack(partials, dim=1)  # (num_heads, num_partitions, head_size)
        global_m = m.amax(dim=-1, keepdim=True)
        rescaled = s * torch.exp(m - global_m)
        total = rescaled.sum(dim=-1, keepdim=True)
        weights = rescaled / total  # (num_heads, num_partitions)
        out[seq] = torch.bmm(weights.unsqueeze(1), partial_out).squeeze(1)
    return out
