"""FlexAttention over PyTorch's own paging, compiled for one shape."""

from __future__ import annotations

import time

import torch

from paged_attention.bench.peers.data import Batch, Call, Unavailable


def flex_paged(batch: Batch) -> tuple[Call, str]:
    """A compiled call over a cache whose pages are the batch's blocks, in the same order.

    Its unused slots hold zeros. What they hold is multiplied by 0, and NaN would stay NaN.

    Returns: the call;  how long compiling it took
    Raises:  Unavailable: several sequences, or a torch without PagedAttention
    Source:  torch.nn.attention.experimental._paged_attention (experimental by its own words)
    """
    sequence = batch.only_sequence
    if batch.q_len > 1:
        raise Unavailable("takes one query token")
    try:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        raise Unavailable(f"torch {torch.__version__} has no PagedAttention") from None
    key, value = batch.gather(sequence)
    num_tokens, device = sequence.num_tokens, key.device
    only = torch.zeros(1, dtype=torch.long, device=device)
    length = torch.tensor([num_tokens], device=device)

    pages = PagedAttention(batch.num_blocks, batch.block_size, 1, device=str(device))
    pages.empty_pages = sequence.block_ids.tolist()  # it takes them in this order
    pages.reserve(only, length)
    slots = (1, key.shape[1], batch.num_blocks * batch.block_size, key.shape[3])
    key_cache, value_cache = key.new_zeros(slots), value.new_zeros(slots)
    positions = torch.arange(num_tokens, device=device)[None]
    pages.assign(only, positions, key, value, key_cache, value_cache)
    mask = create_block_mask(
        lambda b, head, row, token: token < num_tokens,
        B=1,
        H=None,
        Q_LEN=1,
        KV_LEN=len(sequence.block_ids) * batch.block_size,
        device=str(device),
        BLOCK_SIZE=(1, batch.block_size),
    )
    mask = pages.convert_logical_block_mask(mask, kv_len=length)

    torch.compiler.reset()  # another context's code is of no use to this one
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    query = sequence.query[:, :, None]  # (1, num_heads, 1, head_size)
    options = {"block_mask": mask, "scale": batch.scale, "enable_gqa": True}

    def call() -> torch.Tensor:
        # Compiled code can't run under the mode that counts operations. It has none to count.
        with _disable_current_modes():
            return compiled(query, key_cache, value_cache, **options)[:, :, 0]

    start = time.perf_counter()
    call()
    return call, f"compiled in {time.perf_counter() - start:.0f} s"
