"""PagedKVCache: one pool of blocks, and which sequence owns which of them.

Memory is handed out one block at a time. A sequence is a list of block ids and a number of tokens.
A fork shares its parent's blocks. The pool counts the owners of every block, so a shared block is
copied only when one of its owners is about to write to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from paged_attention.blocks import Blocks, OutOfBlocks
from paged_attention.kernel import checks
from paged_attention.kernel.layouts import Geometry, cache_shapes, tokens_of
from paged_attention.prefixes import SharedPrefixes, shared_prefixes, table_of

__all__ = ["OutOfBlocks", "PagedKVCache"]


class PagedKVCache:
    """Keys and values of many sequences in one pool of blocks.

    Several threads may use one pool. No block is ever given to two of them.

    Args:    num_blocks, block_size, num_kv_heads, head_size: the pool's sizes. A block holds
                   block_size tokens of every layer. num_kv_heads and head_size may be lists,
                   with a number for each layer
             num_layers: each layer has tensors of its own. Block tables serve all layers
             dtype: float32, float16 or bfloat16
             layout: "vllm", "HND" or "NHD", as in `paged_attention`
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Example: a prompt of 6 tokens, a fork of it, and a decode step of both.
        >>> from paged_attention import paged_attention
        >>> cache = PagedKVCache(num_blocks=8, block_size=4, num_kv_heads=2, head_size=16)
        >>> prompt, new, query = torch.rand(6, 2, 16), torch.rand(2, 2, 16), torch.rand(2, 8, 16)
        >>> cache.write(prompt, prompt, cache.extend("a", 6))
        >>> cache.fork("a", "b")
        >>> slots = cache.extend_all(["b", "a"], [1, 1])  # b gets a copy of the half-full block
        >>> cache.write(new, new, slots)  # each layer with the same slots
        >>> tables, lens = cache.block_tables(["b", "a"]), cache.seq_lens(["b", "a"])
        >>> pool = cache.key_cache(), cache.value_cache()
        >>> out = paged_attention(query, *pool, tables, lens, layout=cache.layout)
        >>> slots.tolist(), tables.tolist(), lens.tolist(), cache.num_free_blocks
        ([10, 6], [[0, 2], [0, 1]], [7, 7], 5)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int | Sequence[int],
        head_size: int | Sequence[int],
        *,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        layout: str = "HND",
    ) -> None:
        num_blocks = checks.required_count("num_blocks", num_blocks, 0)
        block_size = checks.required_count("block_size", block_size)
        num_layers = checks.required_count("num_layers", num_layers)
        heads = _of_each_layer("num_kv_heads", num_kv_heads, num_layers)
        sizes = _of_each_layer("head_size", head_size, num_layers)
        self.geometries = [Geometry(num_blocks, block_size, *both) for both in zip(heads, sizes)]
        if dtype not in checks.FLOATS:
            checks.refuse("dtype", "float32, float16 or bfloat16", dtype, TypeError)
        self.layout, self.device = layout, checks.checked_device(device)
        shapes = [cache_shapes(geometry, layout, dtype) for geometry in self.geometries]
        memory = {"dtype": dtype, "device": self.device}
        with torch.inference_mode(False):  # or it couldn't be written to outside of it
            self._keys = [torch.zeros(key_shape, **memory) for key_shape, _ in shapes]
            self._values = [torch.zeros(value_shape, **memory) for _, value_shape in shapes]
        self._blocks = Blocks(num_blocks, block_size)

    @property
    def geometry(self) -> Geometry:
        """The sizes of the first layer. `geometries` has those of all."""
        return self.geometries[0]

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks.free)

    def key_cache(self, layer: int = 0) -> Tensor:
        """The layer's keys, the pool's own tensor in `layout`. IndexError: no such layer."""
        return self._keys[self._layer(layer)]

    def value_cache(self, layer: int = 0) -> Tensor:
        """The layer's values, the pool's own tensor in `layout`. IndexError: no such layer."""
        return self._values[self._layer(layer)]

    def extend(self, seq_id: Hashable, num_tokens: int) -> Tensor:
        """Make room for num_tokens more tokens of a sequence, in all layers at once.

        A sequence is created on its first use. If its last block is partly filled and shared with
        a fork, the block is copied first, so that the other sequence keeps what it had.

        Returns: slot_mapping: (num_tokens,), int64, block id * block_size + offset, for `write`
        Raises:  OutOfBlocks: the pool can't hold them. Nothing is changed
                 TypeError, ValueError: num_tokens is not a whole number of at least 0
        """
        return self.extend_all([seq_id], [num_tokens])

    def extend_all(self, seq_ids: Iterable[Hashable], num_tokens: Iterable[int]) -> Tensor:
        """`extend` several sequences, all of them or none.

        Args:    seq_ids: no two the same;  num_tokens: one number for each
        Returns: slot_mapping: (sum(num_tokens),), int64, one sequence after the other
        Raises:  OutOfBlocks: the pool can't hold them all. Nothing is changed
                 TypeError, ValueError: as extend, or seq_ids and num_tokens don't belong together
        """
        seq_ids, counts = list(seq_ids), list(num_tokens)
        with self._blocks.lock:
            slots = self.reserve_all(seq_ids, counts)
            self.advance_all(seq_ids, counts)
        return slots

    def reserve_all(self, seq_ids: Iterable[Hashable], num_tokens: Iterable[int]) -> Tensor:
        """`extend_all`, but the sequences stay as long as they are until `advance_all`.

        So nobody reads tokens that aren't written yet, or never will be because a step failed.
        `truncate` gives blocks back that are reserved and not needed.
        """
        seq_ids = list(seq_ids)
        counts = [checks.required_count("num_tokens", count, 0) for count in num_tokens]
        if len(counts) != len(seq_ids) or len(set(seq_ids)) != len(seq_ids):
            got = f"{seq_ids!r} and {counts}"
            checks.refuse("seq_ids", "different, as many as num_tokens", got)
        with self._blocks.lock:
            for block, copy in self._blocks.reserve(seq_ids, counts):
                for cached in (*self._keys, *self._values):
                    cached[copy] = cached[block]
            slots = [self._slots(seq_id, count) for seq_id, count in zip(seq_ids, counts)]
        slots = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *slots])
        return slots.to(self.device)

    def advance_all(
        self,
        seq_ids: Iterable[Hashable],
        num_tokens: Iterable[int],
        first_positions: Sequence[int] | None = None,
    ) -> None:
        """Count tokens that are written to the slots which `reserve_all` gave.

        Args:    first_positions: of each sequence's first token, where it isn't what it was. A
                       fork takes it along
        Raises:  ValueError: they weren't reserved. Nothing is changed
        """
        counts = [checks.required_count("num_tokens", count, 0) for count in num_tokens]
        seq_ids = list(seq_ids)
        with self._blocks.lock:
            firsts = self.first_positions(seq_ids) if first_positions is None else first_positions
            self._blocks.advance(seq_ids, counts, list(firsts))

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor, layer: int = 0) -> None:
        """Store keys and values of one layer in the slots that `extend` gave.

        Args:    key, value: (num_tokens, num_kv_heads, head_size), converted to the pool's dtype
                 slot_mapping: (num_tokens,), int32/int64. A negative slot is skipped
        Raises:  TypeError, ValueError: the argument, its value, and what it should be. Nothing is
                 written
        """
        caches = self.key_cache(layer), self.value_cache(layer)
        num_blocks, block_size, num_kv_heads, head_size = self.geometries[layer]
        checks.require_tensor("slot_mapping", slot_mapping, checks.INTS)
        if slot_mapping.dim() != 1:
            checks.refuse("slot_mapping", "(num_tokens,)", tuple(slot_mapping.shape))
        if len(slot_mapping) and slot_mapping.max() >= num_blocks * block_size:
            rule = f"below {num_blocks * block_size}, the slots of the pool"
            checks.refuse("slot_mapping", rule, int(slot_mapping.max()))
        shape, device = (len(slot_mapping), num_kv_heads, head_size), self.device
        for name, tensor in (("key", key), ("value", value)):
            checks.require_floating(name, tensor)
            checks.require_tensor(name, tensor, shape=shape, device=device, like="slots and pool")
        slots = slot_mapping.to(device, torch.int64)
        kept = (slots >= 0).nonzero().squeeze(1)
        places = slots[kept] // block_size, slots[kept] % block_size
        for tokens, new in zip(tokens_of(*caches, self.layout), (key, value)):
            new = new.detach()[kept].to(tokens.dtype)
            tokens.index_put_(places, new.reshape(len(kept), *tokens.shape[2:]))

    def block_tables(self, seq_ids: Iterable[Hashable]) -> Tensor:
        """(len(seq_ids), most blocks any of them has), int32. Shorter rows are padded with -1."""
        return table_of([self._blocks.sequence(seq_id).blocks for seq_id in seq_ids], self.device)

    def seq_lens(self, seq_ids: Iterable[Hashable]) -> Tensor:
        """(len(seq_ids),), int32, tokens."""
        lens = [self._blocks.sequence(seq_id).num_tokens for seq_id in seq_ids]
        return torch.tensor(lens, dtype=torch.int32, device=self.device)

    def shared_prefixes(self, seq_ids: Iterable[Hashable]) -> SharedPrefixes:
        """Which sequences begin with the same blocks, where it pays to read them once, as
        `shared_prefix_attention` takes it. A plan takes its prefix_lens and group_of."""
        sequences = [self._blocks.sequence(seq_id) for seq_id in seq_ids]
        return shared_prefixes(sequences, self.geometry.block_size, self.device)

    def first_positions(self, seq_ids: Iterable[Hashable]) -> list[int]:
        """The position of each sequence's first token: 0, unless `advance_all` was told."""
        return [self._blocks.sequence(seq_id).first_position for seq_id in seq_ids]

    def fork(self, seq_id: Hashable, new_id: Hashable) -> None:
        """Let new_id begin as a copy of seq_id that shares its blocks.

        Raises:  KeyError: seq_id is unknown;  ValueError: new_id already exists
        """
        with self._blocks.lock:
            self._blocks.fork(seq_id, new_id)

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Forget a sequence's tokens past its first num_tokens.

        Blocks that hold none of the others return to the pool if nobody else owns them.

        Raises:  KeyError: seq_id is unknown
                 TypeError, ValueError: num_tokens is not a whole number from 0 to the sequence's
        """
        with self._blocks.lock:
            self._blocks.truncate(seq_id, num_tokens)

    def free(self, seq_id: Hashable) -> None:
        """Forget a sequence. Blocks that nobody else owns return to the pool.

        Raises:  KeyError: seq_id is unknown
        """
        with self._blocks.lock:
            self._blocks.remove(seq_id)

    def _layer(self, layer: int) -> int:
        layer = checks.required_count("layer", layer, 0)
        if layer >= len(self._keys):
            checks.refuse("layer", f"one of the cache's {len(self._keys)}", layer, IndexError)
        return layer

    def _slots(self, seq_id: Hashable, count: int) -> Tensor:
        """Those of the next count tokens, for which there are blocks. (count,), on the CPU"""
        blocks, start, _ = self._blocks.sequence(seq_id)
        block_size = self.geometry.block_size
        positions = torch.arange(start, start + count, device="cpu")
        ids = torch.tensor(blocks, dtype=torch.int64, device="cpu")
        return ids[positions // block_size] * block_size + positions % block_size


def _of_each_layer(name: str, given: int | Sequence[int], num_layers: int) -> list[int]:
    numbers = list(given) if isinstance(given, (list, tuple)) else [given] * num_layers
    if len(numbers) != num_layers:
        checks.refuse(name, f"one number, or one for each of {num_layers} layers", given)
    return [checks.required_count(name, number) for number in numbers]
