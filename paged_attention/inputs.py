"""Inputs to decode, for measuring and teaching, with everything unused poisoned.

Blocks lie in random order; slots past a sequence's end and blocks nobody references hold NaN, so
that a kernel that reads them shows it.
"""

from typing import NamedTuple

import torch

from paged_attention.kernel.layouts import Geometry, cache_shapes, tokens_of
from paged_attention.kernel.partition import ceil_div


class Inputs(NamedTuple):
    """The five tensors of `paged_attention`, in its order."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor


def random_inputs(
    seq_lens,
    *,
    num_heads=24,
    num_kv_heads=4,
    head_size=256,
    block_size=16,
    dtype=torch.float32,
    device="cpu",
    layout="vllm",
    seed=0,
    poison=True,
):
    """A random batch with a paged cache of its own, one spare block included.

    Queries are drawn wide enough that the softmax has peaks.

    Args:    seq_lens: list of int, tokens per sequence
             device: "meta" gives query and caches no memory, while block_tables and seq_lens are
                   real CPU tensors: what reads a block id on the host can still be counted
             seed: the same seed gives the same values on one version of PyTorch
             poison: NaN in the slots and the block that no sequence uses
    Returns: Inputs, the caches in `layout`, block ids int32
    Raises:  ValueError: as `layouts.cache_shapes`
    """
    num_live = [ceil_div(seq_len, block_size) for seq_len in seq_lens]
    num_blocks = sum(num_live) + 1
    geometry = Geometry(num_blocks, block_size, num_kv_heads, head_size)
    key_shape, value_shape = cache_shapes(geometry, layout, dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(num_blocks, generator=generator, device="cpu").to(torch.int32)
    shape = len(seq_lens), max(num_live, default=0)
    tables = torch.full(shape, -1, dtype=torch.int32, device="cpu")
    for seq, ids in enumerate(order[:-1].split(num_live)):
        tables[seq, : len(ids)] = ids
    lens = torch.tensor(seq_lens, dtype=torch.int32, device="cpu")
    query_shape = (len(seq_lens), num_heads, head_size)
    if torch.device(device).type == "meta":
        query, key, value = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape in (query_shape, key_shape, value_shape)
        )
        return Inputs(query, key, value, tables, lens)

    query, key, value = (
        torch.empty(shape, dtype=dtype, device="cpu").normal_(generator=generator)
        for shape in (query_shape, key_shape, value_shape)
    )
    query.mul_(2.0)  # logits of standard deviation 2 at scale head_size ** -0.5
    if poison:
        for tokens in tokens_of(key, value, layout):
            tokens[int(order[-1])] = torch.nan
            for seq, seq_len in enumerate(seq_lens):
                if seq_len % block_size:
                    tokens[int(tables[seq, num_live[seq] - 1]), seq_len % block_size :] = torch.nan
    return Inputs(*(x.to(device) for x in (query, key, value, tables, lens)))


def uniform_inputs(seq_lens, *, num_heads=1, num_kv_heads=1, head_size=16, block_size=16):
    """A batch whose answer is known: (n - 1) / 2 in each lane for a sequence of n tokens.

    The query is 0, so that all keys weigh the same, and token t's value is t.

    Returns: Inputs, float32, layout "vllm", poisoned as `random_inputs` poisons
    """
    inputs = random_inputs(
        seq_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    inputs.query.zero_()
    _, values = tokens_of(inputs.key_cache, inputs.value_cache, "vllm")
    for seq, seq_len in enumerate(seq_lens):
        blocks = inputs.block_tables[seq, : ceil_div(seq_len, block_size)].long()
        t = torch.arange(len(blocks) * block_size, dtype=torch.float32)
        t[seq_len:] = torch.nan
        values[blocks] = t.view(-1, block_size, 1, 1).expand(-1, -1, num_kv_heads, head_size)
    return inputs


def paged_inputs(query, key, value, *, block_size=16, layout="vllm", seed=0):
    """One sequence's own keys and values, put into a paged cache, one spare block included.

    Args:    query: (1, num_heads, head_size)
             key, value: (num_tokens, num_kv_heads, head_size)
             seed: of the blocks' order
    Returns: Inputs, the caches in `layout` and key's dtype, block ids int32
    Raises:  ValueError: as `layouts.cache_shapes`
    """
    num_tokens = len(key)
    num_blocks = ceil_div(num_tokens, block_size)
    order = torch.randperm(num_blocks + 1, generator=torch.Generator().manual_seed(seed))
    table = order[:num_blocks]

    def in_blocks(dense):  # (num_blocks + 1, block_size, num_kv_heads, head_size)
        slots = dense.new_full((num_blocks * block_size, *dense.shape[1:]), torch.nan)
        slots[:num_tokens] = dense
        blocks = dense.new_full((num_blocks + 1, block_size, *dense.shape[1:]), torch.nan)
        blocks[table] = slots.view(num_blocks, block_size, *dense.shape[1:])
        return blocks

    key_cache, value_cache = pack(in_blocks(key), in_blocks(value), layout)
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    return Inputs(query, key_cache, value_cache, table[None].to(torch.int32), lens)


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
