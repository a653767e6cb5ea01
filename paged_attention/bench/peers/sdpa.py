"""What plain PyTorch offers: gather a sequence's blocks, then `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch.nn import functional

from paged_attention.bench.peers.data import Batch, CachedSequence, Call, Unavailable


def gather_sdpa(batch: Batch) -> tuple[Call, str]:
    """Fetch a sequence's blocks, put heads first, attend; then the next sequence."""
    _need_gqa()
    shape = batch.inputs.query.shape
    return (
        lambda: torch.cat([_attend(batch, s, *batch.gather(s)) for s in batch.sequences]).view(
            shape
        ),
        "",
    )


def dense_sdpa(batch: Batch) -> tuple[Call, str]:
    """Attend to keys and values that lie in order already: no paging, and no copy is timed."""
    sequence = batch.only_sequence
    _need_gqa()
    key, value = (tokens.contiguous() for tokens in batch.gather(sequence))
    return lambda: _attend(batch, sequence, key, value).view(batch.inputs.query.shape), ""


def _attend(
    batch: Batch, sequence: CachedSequence, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    query, mask = sequence.query.transpose(0, 1)[None], None  # (1, num_heads, q_len, head_size)
    if batch.q_len > 1:  # the last row sees all keys, and each row above sees one fewer
        ones = torch.ones(batch.q_len, sequence.num_tokens, dtype=torch.bool, device=key.device)
        mask = ones.tril(sequence.num_tokens - batch.q_len)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=batch.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)  # (q_len, num_heads, head_size)


def _need_gqa() -> None:
    one = torch.zeros(1, 1, 1, 1)
    try:
        functional.scaled_dot_product_attention(one, one, one, enable_gqa=True)
    except TypeError:
        raise Unavailable("SDPA has enable_gqa from torch 2.5 on") from None
