"""Stage 1, naive loops: PagedAttention V2 written as it is told.

Per sequence: fetch its blocks one by one, reduce each partition on its own (Phase 1), merge the
partitions (Phase 2). Every block and every partition is a trip through the Python interpreter, and
every block id is read back to the host.
"""

import torch


def naive_loops(query, key_cache, value_cache, block_tables, seq_lens, scale, partition_size=512):
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
        q = query[seq].float() * scale  # (num_heads, head_size)

        # Fetch the sequence, one block at a time.
        shape = (num_blocks * block_size, num_kv_heads, head_size)
        k = torch.empty(shape, dtype=key_cache.dtype, device=query.device)
        v = torch.empty(shape, dtype=value_cache.dtype, device=query.device)
        for i in range(num_blocks):
            block_id = int(block_tables[seq, i])
            slots = slice(i * block_size, (i + 1) * block_size)
            k_block = key_cache[block_id]  # (num_kv_heads, head_size/x, block_size, x)
            k[slots].view(block_size, num_kv_heads, -1, k_block.shape[-1]).copy_(
                k_block.permute(2, 0, 1, 3)
            )
            v[slots].copy_(value_cache[block_id].permute(2, 0, 1))

        # Phase 1: one partition at a time, heads repeated: each query head has its own K and V.
        max_logits, exp_sums, partials = [], [], []
        for p in range(num_partitions):
            tokens = slice(p * partition_size, min((p + 1) * partition_size, seq_len))
            k_p = k[tokens].float().repeat_interleave(num_queries_per_kv, dim=1)
            v_p = v[tokens].float().repeat_interleave(num_queries_per_kv, dim=1)
            logits = torch.einsum("hd,thd->ht", q, k_p)  # (num_heads, tokens)
            m = logits.amax(dim=-1, keepdim=True)  # (num_heads, 1)
            weights = torch.exp(logits - m)
            s = weights.sum(dim=-1, keepdim=True)
            max_logits.append(m)
            exp_sums.append(s)
            partials.append(torch.einsum("ht,thd->hd", weights / s, v_p))

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
