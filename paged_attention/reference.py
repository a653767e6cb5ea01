"""The judge: dense attention in float64, one sequence and one head at a time, without tricks.

It shares with the kernel only the checks of its arguments and the layouts' shapes. Tokens are
looked up one by one in the block table, and every option is applied in the order of its
definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attention.kernel.call import Inputs, check_call, check_values, lengths_on_host
from paged_attention.kernel.fp8 import element_dtype
from paged_attention.kernel.layouts import tokens_of
from paged_attention.kernel.options import Options


def reference_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    layout: str | None = None,
    scale: float | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """What `paged_attention` should return, computed in float64 by definition.

    Args:    as `paged_attention`. Logits are scaled, soft-capped, biased and masked in this order
    Returns: out: query's shape, float64
             lse: out.shape[:-1], float64, natural log, the sink included. A query that sees no
             key has out 0 and lse -inf (or the sink)
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Cost:    a float64 copy of one sequence's K and V at a time. It is for judging, not for use
    Example: as `paged_attention`'s
        >>> pool = torch.arange(8.0).view(2, 1, 4, 1).expand(2, 1, 4, 16)
        >>> tables, lens = torch.tensor([[1, 0]]), torch.tensor([5])
        >>> step = torch.zeros(1, 2, 16), pool, pool, tables, lens
        >>> out, lse = reference_attention(*step, layout="HND")
        >>> out[0, :, 0].tolist(), lse[0].exp().round().tolist()
        ([4.4, 4.4], [5.0, 5.0])
    """
    inputs = Inputs(query, key_cache, value_cache, block_tables, seq_lens)
    options = Options(scale, k_scale, v_scale, alibi_slopes, window, softcap, sinks, causal)
    call = check_call(inputs, layout, kv_cache_dtype, options)
    lengths = lengths_on_host(call, None)
    check_values(call, lengths)
    shape, options = call.shape, call.options
    num_heads, num_kv_heads, _, block_size, _, q_len, window = shape
    scale, softcap = options.scale, options.softcap
    assert scale is not None
    dtype = element_dtype(key_cache.dtype, kv_cache_dtype)
    if dtype.itemsize == 1:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    # Each (num_blocks, block_size, num_kv_heads, head_size):
    key, value = (t.flatten(3) for t in tokens_of(key_cache, value_cache, call.layout))
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
        first = 0 if window is None else max(0, seq_len - (window + q_len - 1))
        positions = torch.arange(first, seq_len, device=query.device)  # that a row may see
        blocks = block_tables[seq, positions // block_size].long()
        slots = blocks, positions % block_size
        k = key[slots].view(dtype).double() * k_scale  # (positions, num_kv_heads, head_size)
        v = value[slots].view(dtype).double() * v_scale
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            q = rows[seq, :, head].double()  # (q_len, head_size)
            logits = q @ k[:, kv_head].T * scale  # (q_len, positions)
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
                seen = ~hidden[i]  # a hidden value may be NaN: it may not be touched
                if seen.any():
                    out[seq, i, head] = weights[i, : len(positions)][seen] @ v[seen, kv_head]
    return out.view(query.shape), lse.view(query.shape[:-1])
