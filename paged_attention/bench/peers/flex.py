"""FlexAttention over PyTorch's own paging, compiled for one shape: a peer of our kernel's."""

from __future__ import annotations

import time

import torch

from paged_attention.bench.peers.time_limit import time_limit

COMPILE_SECONDS = 120.0  # a compilation that takes longer is given up; on two cores it took 23


class Missing(Exception):
    """It can't be called here; the message says why."""


def decode_call(query, key, value, block_ids, num_blocks, block_size, scale):
    """A compiled call, on a cache whose pages are the given blocks, in the same order.

    Unused slots hold zeros: what they hold is multiplied by 0, and NaN would stay.

    Args:    query: (1, num_heads, head_size)
             key, value: (1, num_kv_heads, num_tokens, head_size)
             block_ids: (blocks,), int32, where the tokens go
             num_blocks: of the pool
             block_size: tokens of a page
             scale: float, multiplies the logits
    Returns: the call, which returns (1, num_heads, head_size); a note: what compiling took
    Raises:  Missing: this torch has no PagedAttention; TimeoutError: COMPILE_SECONDS are over
    Source:  torch.nn.attention.experimental._paged_attention (experimental by its own words)
    """
    try:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        raise Missing(f"torch {torch.__version__} has no PagedAttention") from None
    device, tokens = query.device, key.shape[2]
    only = torch.zeros(1, dtype=torch.long, device=device)
    length = torch.tensor([tokens], device=device)

    pages = PagedAttention(num_blocks, block_size, 1, device=str(device))
    pages.empty_pages = block_ids.tolist()  # those it takes, in this order
    pages.reserve(only, length)
    key_cache, value_cache = (
        query.new_zeros(1, key.shape[1], num_blocks * block_size, key.shape[3]) for _ in range(2)
    )
    positions = torch.arange(tokens, device=device)[None]
    pages.assign(only, positions, key, value, key_cache, value_cache)
    mask = create_block_mask(
        lambda batch, head, row, token: token < tokens,
        *(1, None, 1, len(block_ids) * block_size),
        device=str(device),
        BLOCK_SIZE=(1, block_size),
    )
    mask = pages.convert_logical_block_mask(mask, kv_len=length)

    torch.compiler.reset()  # a context's code is no use to the next one
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    one_row = query[:, :, None]

    def call():
        with _uncounted():
            out = compiled(
                *(one_row, key_cache, value_cache), block_mask=mask, scale=scale, enable_gqa=True
            )
        return out[:, :, 0]

    start = time.perf_counter()
    with time_limit(COMPILE_SECONDS):
        call()
    return call, f"compiled in {time.perf_counter() - start:.0f} s"


def _uncounted():
    """Without the mode that counts operations: compiled code has none, and can't run under it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
