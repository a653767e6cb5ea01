"""The judge: dense attention in float64, one sequence and one head at a time, no tricks.

Nothing here is shared with the kernel but the checks of its arguments and the reading of the
layouts' shapes: tokens are looked up one by one in the block table, K and V are taken as they are
defined, and every option is applied in the order it is defined.
"""

import torch

from paged_attention.kernel.checks import check_block_ids, check_lengths, check_tensors
from paged_attention.kernel.fp8 import meaning_of
from paged_attention.kernel.layouts import unpack
from paged_attention.kernel.options import check_values, make_options


def reference_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    *,
    layout=None,
    scale=None,
    kv_cache_dtype="auto",
    k_scale=1.0,
    v_scale=1.0,
    alibi_slopes=None,
    window=None,
    softcap=None,
    sinks=None,
    causal=True,
):
    """What `paged_attention` should return, computed in float64 by definition.

    Args:    as `paged_attention`; query may have q_len rows, (num_seqs, q_len, num_heads,
             head_size), row i at position seq_len - q_len + i. Every option is applied: logits
             are scaled, soft-capped (softcap * tanh(logit / softcap)), biased
             (alibi_slopes[head] * (key position - query position)) and masked, in this order;
             window counts visible keys including the newest; sinks[head] is a logit that takes
             weight and has no value
    Returns: out: query's shape, float64;  lse: out.shape[:-1], float64, natural log, the sink
             included. A query that sees no key: out 0, lse -inf (or the sink)
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Cost:    a float64 copy of one sequence's K and V at a time; for judging, not for use
    """
    layout, geometry = check_tensors(
        query, key_cache, value_cache, block_tables, seq_lens, layout, kv_cache_dtype
    )
    num_heads, head_size = query.shape[-2:]
    num_kv_heads, block_size = geometry.num_kv_heads, geometry.block_size
    options = make_options(
        query, geometry, scale, softcap, alibi_slopes, causal, window, sinks, k_scale, v_scale
    )
    check_values(options)
    softcap, window = options.softcap, options.window
    lengths = seq_lens.tolist()
    check_lengths(lengths, block_tables, geometry, None)
    q_len = query.shape[1] if query.dim() == 4 else 1
    reach = max(lengths, default=0) if window is None else window + q_len - 1
    firsts = [max(0, n - reach) for n in lengths]
    check_block_ids(lengths, firsts, block_tables, geometry)
    meaning = meaning_of(key_cache.dtype, kv_cache_dtype)
    if meaning.itemsize == 1:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    # Each (num_blocks, block_size, num_kv_heads, head_size):
    key, value = unpack(key_cache, value_cache, layout)
    k_scale, v_scale = (
        torch.as_tensor(x, dtype=torch.float64, device=query.device)
        .expand(num_kv_heads)
        .unsqueeze(1)
        for x in (options.k_scale, options.v_scale)
    )
    rows = query if query.dim() == 4 else query.unsqueeze(1)

    out = torch.zeros(rows.shape, dtype=torch.float64, device=query.device)
    lse = torch.full(rows.shape[:-1], -torch.inf, dtype=torch.float64, device=query.device)
    for seq, seq_len in enumerate(lengths):
        positions = torch.arange(firsts[seq], seq_len, device=query.device)  # that a row may see
        blocks = block_tables[seq, positions // block_size].long()
        slots = blocks, positions % block_size
        k = key[slots].view(meaning).double() * k_scale  # (positions, num_kv_heads, head_size)
        v = value[slots].view(meaning).double() * v_scale
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            q = rows[seq, :, head].double()  # (q_len, head_size)
            logits = q @ k[:, kv_head].T * options.scale  # (q_len, positions)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            newest = torch.arange(q_len, device=query.device).unsqueeze(1) + seq_len - q_len
            if alibi_slopes is not None:
                logits = logits + alibi_slopes[head].double() * (positions - newest)
            hidden = positions > newest if causal else (positions < 0).expand(q_len, -1)
            if window is not None:
                hidden = hidden | (positions <= newest - window)
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                sink = sinks[head].double().expand(q_len, 1)
                logits = torch.cat([logits, sink], dim=1)
            lse[seq, :, head] = torch.logsumexp(logits, dim=1)
            # Not exp(logits - lse): where logits are huge, lse has rounded ln s away.
            weights = torch.softmax(logits, dim=1)
            for i in range(q_len):
                seen = ~hidden[i]  # a hidden value may be NaN: it must not be touched
                if seen.any():
                    out[seq, i, head] = weights[i, : len(positions)][seen] @ v[seen, kv_head]
    return out.view(query.shape), lse.view(query.shape[:-1])
