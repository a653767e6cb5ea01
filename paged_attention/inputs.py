"""Inputs to decode, for measuring and teaching, with everything unused poisoned.

Blocks lie in random order. Slots past a sequence's end and blocks that no sequence owns hold NaN,
so that a kernel that reads them shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_attention.kernel.call import Inputs
from paged_attention.kernel.layouts import Geometry, cache_shapes, tokens_of
from paged_attention.kernel.partition import ceil_div


def random_inputs(
    seq_lens: Sequence[int],
    *,
    num_heads: int = 24,
    num_kv_heads: int = 4,
    head_size: int = 256,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: str = "vllm",
    seed: int = 0,
    poison: bool = True,
) -> Inputs:
    """A random batch, with a paged cache of its own that has one spare block.

    Queries are drawn wide enough that the softmax has peaks.

    Args:    seq_lens: tokens of each sequence
             num_heads, num_kv_heads, head_size: of the query and of the caches
             block_size: tokens of a block
             dtype: of the query and of the caches
             device: on "meta" the query and the caches take no memory, but block_tables and
                   seq_lens are real CPU tensors, so that reads of a block id can be counted
             layout: of the caches
             seed: the same seed gives the same values on one version of PyTorch
             poison: put NaN into the slots and the block that no sequence uses
    Returns: Inputs, block ids int32
    Raises:  ValueError: as `layouts.cache_shapes`

    Example:
        >>> query, key_cache, value_cache, block_tables, seq_lens = random_inputs([40, 3])
        >>> query.shape, value_cache.shape, block_tables.shape
        (torch.Size([2, 24, 256]), torch.Size([5, 4, 256, 16]), torch.Size([2, 3]))
    """
    num_live = [ceil_div(seq_len, block_size) for seq_len in seq_lens]
    num_blocks = sum(num_live) + 1
    geometry = Geometry(num_blocks, block_size, num_kv_heads, head_size)
    shapes = ((len(seq_lens), num_heads, head_size), *cache_shapes(geometry, layout, dtype))
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(num_blocks, generator=generator, device="cpu").to(torch.int32)
    *blocks, [spare] = order.split([*num_live, 1])
    tables = torch.full(
        (len(seq_lens), max(num_live, default=0)), -1, dtype=torch.int32, device="cpu"
    )
    for table, ids in zip(tables, blocks):
        table[: len(ids)] = ids
    lens = torch.tensor(seq_lens, dtype=torch.int32, device="cpu")
    if torch.device(device).type == "meta":
        query, key, value = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        return Inputs(query, key, value, tables, lens)

    query, key, value = (
        torch.empty(shape, dtype=dtype, device="cpu").normal_(generator=generator)
        for shape in shapes
    )
    query.mul_(2.0)  # logits of standard deviation 2 at scale head_size ** -0.5
    if poison:
        for tokens in tokens_of(key, value, layout):  # (num_blocks, block_size, ...)
            tokens[int(spare)] = torch.nan
            for ids, seq_len in zip(blocks, seq_lens):
                if seq_len % block_size:
                    tokens[int(ids[-1]), seq_len % block_size :] = torch.nan
    return Inputs(*(x.to(device) for x in (query, key, value, tables, lens)))


def uniform_inputs(
    seq_lens: Sequence[int],
    *,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_size: int = 16,
    block_size: int = 16,
) -> Inputs:
    """A batch whose answer is known: (n - 1) / 2 in each lane for a sequence of n tokens.

    The query is 0, so that all keys weigh the same, and each lane of token t's value is t.

    Args:    as for `random_inputs`
    Returns: Inputs, float32, layout "vllm", poisoned as `random_inputs` poisons

    Example:
        >>> from paged_attention import paged_attention
        >>> paged_attention(*uniform_inputs([5, 100]), scale=1.0)[:, 0, 0]
        tensor([ 2.0000, 49.5000])
    """
    inputs = random_inputs(
        seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        block_size=block_size,
    )  # fmt: skip
    inputs.query.zero_()
    _, values = tokens_of(inputs.key_cache, inputs.value_cache, "vllm")
    for table, seq_len in zip(inputs.block_tables, seq_lens):
        blocks = table[: ceil_div(seq_len, block_size)].long()
        t = torch.arange(len(blocks) * block_size, dtype=torch.float32)
        t[seq_len:] = torch.nan
        values[blocks] = t.view(-1, block_size, 1, 1).expand(-1, -1, num_kv_heads, head_size)
    return inputs


def paged_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int = 16,
    layout: str = "vllm",
    seed: int = 0,
) -> Inputs:
    """One sequence's own keys and values, put into a paged cache that has one spare block.

    Args:    query: (1, num_heads, head_size)
             key, value: (num_tokens, num_kv_heads, head_size)
             block_size: tokens of a block
             layout: of the caches
             seed: of the blocks' order
    Returns: Inputs, the caches in key's dtype, block ids int32
    Raises:  ValueError: as `layouts.cache_shapes`
    """
    num_tokens = len(key)
    num_blocks = ceil_div(num_tokens, block_size)
    order = torch.randperm(num_blocks + 1, generator=torch.Generator().manual_seed(seed))
    table = order[:-1].to(torch.int32)[None]

    def in_blocks(dense: torch.Tensor) -> torch.Tensor:
        slots = dense.new_full(((num_blocks + 1) * block_size, *dense.shape[1:]), torch.nan)
        slots[:num_tokens] = dense
        return slots.unflatten(0, (-1, block_size))[order.argsort()]

    key_cache, value_cache = pack(in_blocks(key), in_blocks(value), layout)
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    return Inputs(query, key_cache, value_cache, table, lens)


def pack(key: torch.Tensor, value: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of plain keys and values, laid out as a cache.

    Args:    key, value: (num_blocks, block_size, num_kv_heads, head_size), same dtype
             layout: "vllm", "HND" or "NHD"
    Returns: (key_cache, value_cache), contiguous, freshly allocated. `unpack` gives the same
             bits back
    Raises:  ValueError: as layouts.cache_shapes
    """
    key_shape, value_shape = cache_shapes(Geometry(*key.shape), layout, key.dtype)
    caches = key.new_empty(key_shape), value.new_empty(value_shape)
    key_tokens, value_tokens = tokens_of(*caches, layout)
    key_tokens.copy_(key.reshape(key_tokens.shape))
    value_tokens.copy_(value)
    return caches


def unpack(
    key_cache: torch.Tensor, value_cache: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack`.

    Returns: (key, value), each (num_blocks, block_size, num_kv_heads, head_size). They are views
             where the layout allows it, and copies otherwise
    """
    key, value = tokens_of(key_cache, value_cache, layout)
    return key.flatten(3), value
