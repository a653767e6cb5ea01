"""The judge: dense attention in float64, one sequence and one head at a time, no tricks.

Nothing here is shared with the kernel but the reading of the layouts' shapes: tokens are looked
up one by one in the block table, K and V are taken as they are defined, and every option is
applied in the order it is defined.
"""

import torch

from .layouts import unpack


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
    Raises:  ValueError: causal=False with window or alibi_slopes, or a cache dtype that
             kv_cache_dtype doesn't describe
    Cost:    a float64 copy of one sequence's K and V at a time; for judging, not for use
    """
    if not causal and (window is not None or alibi_slopes is not None):
        raise ValueError(f"causal=False takes no window and no ALiBi, got window={window!r}")
    if layout is None and key_cache.dim() != 5:
        raise ValueError(f'layout must be "HND" or "NHD" for a {key_cache.dim()}-D key_cache')
    key, value = unpack(
        _described(key_cache, kv_cache_dtype),
        _described(value_cache, kv_cache_dtype),
        layout or "vllm",
    )  # (num_blocks, block_size, num_kv_heads, head_size)
    block_size, num_kv_heads = key.shape[1:3]
    rows = query if query.dim() == 4 else query.unsqueeze(1)
    num_seqs, q_len, num_heads, head_size = rows.shape
    scale = head_size**-0.5 if scale is None else scale
    k_scale, v_scale = _per_head(k_scale, num_kv_heads), _per_head(v_scale, num_kv_heads)

    out = torch.zeros(rows.shape, dtype=torch.float64, device=query.device)
    lse = torch.full(rows.shape[:-1], -torch.inf, dtype=torch.float64, device=query.device)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        positions = torch.arange(seq_len, device=query.device)
        blocks = block_tables[seq, : -(-seq_len // block_size)].long()
        slots = blocks[positions // block_size], positions % block_size
        k = key[slots].double() * k_scale  # (seq_len, num_kv_heads, head_size)
        v = value[slots].double() * v_scale
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            logits = rows[seq, :, head].double() @ k[:, kv_head].T * scale  # (q_len, seq_len)
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
            for i in range(q_len):
                seen = ~hidden[i]  # a hidden value may be NaN: it must not be touched
                if seen.any():
                    weights = torch.exp(logits[i, :seq_len][seen] - lse[seq, i, head])
                    out[seq, i, head] = weights @ v[seen, kv_head]
    return out.view(query.shape), lse.view(query.shape[:-1])


def _described(cache, kv_cache_dtype):
    """The cache with its numbers readable: uint8 seen as the float8 that kv_cache_dtype names."""
    if kv_cache_dtype == "auto":
        if cache.dtype == torch.uint8:
            raise ValueError('kv_cache_dtype must name the format of a uint8 cache, got "auto"')
        return cache
    formats = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    if kv_cache_dtype not in formats:
        raise ValueError(
            f"kv_cache_dtype must be one of {('auto', *formats)}, got {kv_cache_dtype!r}"
        )
    if cache.dtype != torch.uint8:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} needs a uint8 cache, got {cache.dtype}"
        )
    return cache.view(getattr(torch, formats[kv_cache_dtype]))


def _per_head(scale, num_kv_heads):
    """A float, one element, or (num_kv_heads,), to multiply (tokens, num_kv_heads, head_size)."""
    if not isinstance(scale, torch.Tensor):
        return scale
    return scale.double().expand(num_kv_heads).unsqueeze(-1) if scale.dim() < 2 else scale.double()
