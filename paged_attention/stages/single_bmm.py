"""Stage 3, a single bmm: one for all of Q @ K^T, one for all of weights @ V.

The loop over partitions goes too. Logits are padded to whole partitions with -inf and V with
zeros, so that a reshape makes partitions a batch dimension.
"""

import torch


def single_bmm(query, key_cache, value_cache, block_tables, seq_lens, scale, partition_size=512):
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

        # Phase 1: all partitions at once, heads repeated: each query head has its own K and V.
        k = k[:, :seq_len].float().repeat_interleave(num_queries_per_kv, dim=0)
        v = v[:, :seq_len].float().repeat_interleave(num_queries_per_kv, dim=0)
        padded = num_partitions * partition_size
        logits = q.new_full((num_heads, padded), -torch.inf)
        logits[:, :seq_len] = torch.bmm(q, k.transpose(1, 2)).squeeze(1)
        logits = logits.view(num_heads, num_partitions, partition_size)
        m = logits.amax(dim=-1, keepdim=True)  # (num_heads, num_partitions, 1)
        weights = torch.exp(logits - m)
        s = weights.sum(dim=-1, keepdim=True)
        v_padded = q.new_zeros(num_heads, padded, head_size)
        v_padded[:, :seq_len] = v
        partial_out = torch.bmm(  # (num_heads * num_partitions, 1, head_size)
            (weights / s).view(num_heads * num_partitions, 1, partition_size),
            v_padded.view(num_heads * num_partitions, partition_size, head_size),
        ).view(num_heads, num_partitions, head_size)

        # Phase 2: bring the partitions to one common maximum, then average them.
        m, s = m.squeeze(-1), s.squeeze(-1)  # (num_heads, num_partitions)
        global_m = m.amax(dim=-1, keepdim=True)
        rescaled = s * torch.exp(m - global_m)
        total = rescaled.sum(dim=-1, keepdim=True)
        weights = rescaled / total  # (num_heads, num_partitions)
        out[seq] = torch.bmm(weights.unsqueeze(1), partial_out).squeeze(1)
    return out
