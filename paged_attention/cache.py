"""PagedKVCache: one pool of blocks, and which sequence owns which of them.

Memory is handed out one block at a time. A sequence is a list of block ids and a number of tokens.
A fork shares its parent's blocks. The pool counts the owners of every block, so a shared block is
copied only when one of its owners is about to write to it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attention.kernel import checks
from paged_attention.kernel.layouts import Geometry, cache_shapes, tokens_of
from paged_attention.kernel.partition import ceil_div


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than a step needs. Nothing was changed.

    Example:
        >>> PagedKVCache(1, 16, 2, 64).extend("a", 17)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        paged_attention.cache.OutOfBlocks: seq_ids ['a'] need 2 more blocks ... 1 of 1 are free
    """


class _Sequence(NamedTuple):
    blocks: list[int]
    num_tokens: int


class PagedKVCache:
    """Keys and values of many sequences in one pool of blocks.

    Several threads may use one pool. No block is ever given to two of them.

    Args:    num_blocks, block_size, num_kv_heads, head_size: the pool's sizes. A block holds
                   block_size tokens of every layer
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
        num_kv_heads: int,
        head_size: int,
        *,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        layout: str = "HND",
    ) -> None:
        self.geometry = Geometry(
            checks.required_count("num_blocks", num_blocks, 0),
            checks.required_count("block_size", block_size),
            checks.required_count("num_kv_heads", num_kv_heads),
            checks.required_count("head_size", head_size),
        )
        num_layers = checks.required_count("num_layers", num_layers)
        if dtype not in checks.FLOATS:
            checks.refuse("dtype", "float32, float16 or bfloat16", dtype, TypeError)
        self.layout = layout
        key_shape, value_shape = cache_shapes(self.geometry, layout, dtype)
        where = checks.checked_device(device)
        with torch.inference_mode(False):  # or it couldn't be written to outside of it
            self._keys = torch.zeros(num_layers, *key_shape, dtype=dtype, device=where)
            self._values = torch.zeros(num_layers, *value_shape, dtype=dtype, device=where)
        self._free = list(range(self.geometry.num_blocks))[::-1]  # the last one is taken first
        self._owners = [0] * self.geometry.num_blocks
        self._sequences: dict[Hashable, _Sequence] = {}
        self._lock = threading.RLock()  # held while blocks change hands

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

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
        seq_ids = list(seq_ids)
        counts = [checks.required_count("num_tokens", count, 0) for count in num_tokens]
        if len(counts) != len(seq_ids) or len(set(seq_ids)) != len(seq_ids):
            got = f"{seq_ids!r} and {counts}"
            checks.refuse("seq_ids", "different, as many as num_tokens", got)
        with self._lock:
            needed = self._blocks_needed(seq_ids, counts)
            if needed > len(self._free):
                raise OutOfBlocks(
                    f"seq_ids {seq_ids!r} need {needed} more blocks for num_tokens={counts}, "
                    f"but only {len(self._free)} of {self.geometry.num_blocks} are free"
                )
            slots = [self._extend(seq_id, count) for seq_id, count in zip(seq_ids, counts)]
        slots = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *slots])
        return slots.to(self._keys.device)

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor, layer: int = 0) -> None:
        """Store keys and values of one layer in the slots that `extend` gave.

        Args:    key, value: (num_tokens, num_kv_heads, head_size), converted to the pool's dtype
                 slot_mapping: (num_tokens,), int32/int64. A negative slot is skipped
        Raises:  TypeError, ValueError: the argument, its value, and what it should be. Nothing is
                 written
        """
        num_blocks, block_size, num_kv_heads, head_size = self.geometry
        caches = self.key_cache(layer), self.value_cache(layer)
        checks.require_tensor("slot_mapping", slot_mapping, checks.INTS)
        if slot_mapping.dim() != 1:
            checks.refuse("slot_mapping", "(num_tokens,)", tuple(slot_mapping.shape))
        if len(slot_mapping) and slot_mapping.max() >= num_blocks * block_size:
            rule = f"below {num_blocks * block_size}, the slots of the pool"
            checks.refuse("slot_mapping", rule, int(slot_mapping.max()))
        shape, device = (len(slot_mapping), num_kv_heads, head_size), self._keys.device
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
        rows = [self._sequence(seq_id).blocks for seq_id in seq_ids]
        longest = max(map(len, rows), default=0)
        padded = [blocks + [-1] * (longest - len(blocks)) for blocks in rows]
        table = torch.tensor(padded, dtype=torch.int32, device=self._keys.device)
        return table.view(len(rows), longest)

    def seq_lens(self, seq_ids: Iterable[Hashable]) -> Tensor:
        """(len(seq_ids),), int32, tokens."""
        lens = [self._sequence(seq_id).num_tokens for seq_id in seq_ids]
        return torch.tensor(lens, dtype=torch.int32, device=self._keys.device)

    def fork(self, seq_id: Hashable, new_id: Hashable) -> None:
        """Let new_id begin as a copy of seq_id that shares its blocks.

        Raises:  KeyError: seq_id is unknown;  ValueError: new_id already exists
        """
        with self._lock:
            parent = self._sequence(seq_id)
            if new_id in self._sequences:
                checks.refuse("new_id", "new to the cache", repr(new_id))
            for block in parent.blocks:
                self._owners[block] += 1
            self._sequences[new_id] = parent

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Forget a sequence's tokens past its first num_tokens.

        Blocks that hold none of the others return to the pool if nobody else owns them.

        Raises:  KeyError: seq_id is unknown
                 TypeError, ValueError: num_tokens is not a whole number from 0 to the sequence's
        """
        num_tokens = checks.required_count("num_tokens", num_tokens, 0)
        with self._lock:
            blocks, have = self._sequence(seq_id)
            if num_tokens > have:
                checks.refuse("num_tokens", f"at most the sequence's {have}", num_tokens)
            kept = ceil_div(num_tokens, self.geometry.block_size)
            self._sequences[seq_id] = _Sequence(blocks[:kept], num_tokens)
            for block in reversed(blocks[kept:]):
                self._release(block)

    def free(self, seq_id: Hashable) -> None:
        """Forget a sequence. Blocks that nobody else owns return to the pool.

        Raises:  KeyError: seq_id is unknown
        """
        with self._lock:
            self.truncate(seq_id, 0)
            del self._sequences[seq_id]

    def _layer(self, layer: int) -> int:
        layer = checks.required_count("layer", layer, 0)
        if layer >= len(self._keys):
            checks.refuse("layer", f"one of the cache's {len(self._keys)}", layer, IndexError)
        return layer

    def _sequence(self, seq_id: Hashable) -> _Sequence:
        if seq_id not in self._sequences:
            raise KeyError(f"seq_id {seq_id!r} is not in the cache")
        return self._sequences[seq_id]

    def _blocks_needed(self, seq_ids: list[Hashable], counts: list[int]) -> int:
        """How many blocks `_extend` will take for all of them."""
        block_size, new, writers = self.geometry.block_size, 0, Counter()
        for seq_id, count in zip(seq_ids, counts):
            blocks, start = self._sequences.get(seq_id, _Sequence([], 0))
            new += ceil_div(start + count, block_size) - len(blocks)
            if count and start % block_size:
                writers[blocks[-1]] += 1
        # Every owner that writes to a shared block gets a copy, but the last one keeps the block.
        return new + sum(min(n, self._owners[block] - 1) for block, n in writers.items())

    def _extend(self, seq_id: Hashable, count: int) -> Tensor:
        """The slots of count more tokens, (count,), on the CPU. There are blocks enough."""
        block_size = self.geometry.block_size
        old, start = self._sequences.get(seq_id, _Sequence([], 0))
        blocks, end = list(old), start + count
        if count and start % block_size and self._owners[blocks[-1]] > 1:
            blocks[-1] = self._copy_of(blocks[-1])
        blocks += [self._take() for _ in range(ceil_div(end, block_size) - len(blocks))]
        self._sequences[seq_id] = _Sequence(blocks, end)
        positions = torch.arange(start, end, device="cpu")
        ids = torch.tensor(blocks, dtype=torch.int64, device="cpu")
        return ids[positions // block_size] * block_size + positions % block_size

    def _take(self) -> int:
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._free.append(block)

    def _copy_of(self, block: int) -> int:
        copy = self._take()
        self._keys[:, copy] = self._keys[:, block]
        self._values[:, copy] = self._values[:, block]
        self._release(block)
        return copy
