"""PagedKVCache: a pool of blocks, and who owns which.

Memory is handed out a block at a time. A sequence is a list of block ids and a length; a fork
shares its parent's blocks, which are counted, and copies the last one only when it is about to be
written to.
"""

from collections import Counter

import torch

from paged_attention.kernel.checks import FLOATS, checked_device, required_count
from paged_attention.kernel.layouts import Geometry, cache_shapes, tokens_of
from paged_attention.kernel.partition import ceil_div


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than a step needs. Nothing was changed."""


class PagedKVCache:
    """Keys and values of many sequences in one pool of blocks.

    Args:    num_blocks, block_size, num_kv_heads, head_size: the pool's sizes; a block holds
                   block_size tokens of every layer
             num_layers: each layer has its own tensors; block tables are common to all
             dtype: float32, float16 or bfloat16
             layout: "vllm", "HND" or "NHD", as in `paged_attention`
    Raises:  TypeError, ValueError: the argument, its value, and what it should be

    One decode step:

        slots = cache.extend(seq_id, 1)             # once
        for layer in range(num_layers):
            cache.write(key, value, slots, layer)
            paged_attention(query, cache.key_cache(layer), cache.value_cache(layer),
                            cache.block_tables([seq_id]), cache.seq_lens([seq_id]),
                            layout=cache.layout)
    """

    def __init__(
        self,
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        *,
        num_layers=1,
        dtype=torch.float32,
        device="cpu",
        layout="HND",
    ):
        self.geometry = Geometry(
            required_count("num_blocks", num_blocks, 0),
            required_count("block_size", block_size, 1),
            required_count("num_kv_heads", num_kv_heads, 1),
            required_count("head_size", head_size, 1),
        )
        num_layers = required_count("num_layers", num_layers, 1)
        if dtype not in FLOATS:
            raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        self.layout = layout
        key_shape, value_shape = cache_shapes(self.geometry, layout, dtype)
        device = checked_device(device)
        self._keys = torch.zeros(num_layers, *key_shape, dtype=dtype, device=device)
        self._values = torch.zeros(num_layers, *value_shape, dtype=dtype, device=device)
        num_blocks = self.geometry.num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # handed out from the end: 0, 1, 2, ...
        self._owners = [0] * num_blocks
        self._blocks = {}  # seq_id -> list of block ids
        self._lens = {}  # seq_id -> tokens

    @property
    def num_free_blocks(self):
        return len(self._free)

    def key_cache(self, layer=0):
        """The layer's keys, the pool's own tensor in `layout`; IndexError without such a layer."""
        return self._keys[self._layer(layer)]

    def value_cache(self, layer=0):
        """The layer's values, the pool's own tensor in `layout`."""
        return self._values[self._layer(layer)]

    def extend(self, seq_id, num_tokens):
        """Make room for num_tokens more tokens of a sequence, in all layers at once.

        A sequence is created on its first use. If its last block is partly filled and shared with
        a fork, it is copied first, so that the other goes on reading what it had.

        Returns: slot_mapping: (num_tokens,), int64, block id * block_size + offset, where `write`
                 puts them
        Raises:  OutOfBlocks: the pool can't hold them; nothing is changed
                 TypeError, ValueError: num_tokens is not a whole number of at least 0
        """
        return self.extend_all([seq_id], [num_tokens])

    def extend_all(self, seq_ids, num_tokens):
        """`extend` several sequences, all of them or none.

        Args:    seq_ids: no two the same;  num_tokens: as many numbers
        Returns: slot_mapping: (sum(num_tokens),), int64, one sequence after the other
        Raises:  OutOfBlocks: the pool can't hold them all; nothing is changed
                 TypeError, ValueError: as extend, or seq_ids and num_tokens don't belong together
        """
        seq_ids = list(seq_ids)
        counts = [required_count("num_tokens", count, 0) for count in num_tokens]
        if len(counts) != len(seq_ids) or len(set(seq_ids)) != len(seq_ids):
            raise ValueError(
                f"seq_ids must be different, as many as num_tokens, got {seq_ids!r} and {counts}"
            )
        needed = self._blocks_needed(seq_ids, counts)
        if needed > len(self._free):
            raise OutOfBlocks(
                f"seq_ids {seq_ids!r} need {needed} more blocks for num_tokens={counts}, "
                f"but only {len(self._free)} of {self.geometry.num_blocks} are free"
            )
        slots = [self._extend(seq_id, count) for seq_id, count in zip(seq_ids, counts)]
        slots = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *slots])
        return slots.to(self._keys.device)

    def write(self, key, value, slot_mapping, layer=0):
        """Store keys and values of one layer in the slots that `extend` gave.

        Args:    key, value: (num_tokens, num_kv_heads, head_size), converted to the pool's dtype
                 slot_mapping: (num_tokens,), int32/int64; a negative slot is skipped
        Raises:  TypeError, ValueError: the argument, its value, and what it should be; nothing is
                 written
        """
        _, block_size, num_kv_heads, head_size = self.geometry
        device = self._keys.device
        key_cache, value_cache = self.key_cache(layer), self.value_cache(layer)
        _check_slots(slot_mapping, self.geometry.num_blocks * block_size)
        shape = (len(slot_mapping), num_kv_heads, head_size)
        for name, tensor in (("key", key), ("value", value)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
            if not tensor.is_floating_point() or tensor.layout != torch.strided:
                raise TypeError(
                    f"{name} must be floating and dense, got {tensor.dtype}, {tensor.layout}"
                )
            if tensor.shape != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device}, got {tensor.device}")
        slots = slot_mapping.to(device, torch.int64)
        kept = (slots >= 0).nonzero().squeeze(1)
        slots = slots[kept]
        block, offset = slots // block_size, slots % block_size
        key_tokens, value_tokens = tokens_of(key_cache, value_cache, self.layout)
        key = key.detach()[kept].to(self._keys.dtype).reshape(-1, *key_tokens.shape[2:])
        key_tokens.index_put_((block, offset), key)
        value_tokens.index_put_((block, offset), value.detach()[kept].to(self._values.dtype))

    def block_tables(self, seq_ids):
        """(len(seq_ids), most blocks any of them has), int32; a shorter row ends in -1."""
        rows = [self._blocks[self._known(seq_id)] for seq_id in seq_ids]
        longest = max(map(len, rows), default=0)
        padded = [blocks + [-1] * (longest - len(blocks)) for blocks in rows]
        table = torch.tensor(padded, dtype=torch.int32, device=self._keys.device)
        return table.view(len(rows), longest)

    def seq_lens(self, seq_ids):
        """(len(seq_ids),), int32, tokens."""
        lens = [self._lens[self._known(seq_id)] for seq_id in seq_ids]
        return torch.tensor(lens, dtype=torch.int32, device=self._keys.device)

    def fork(self, seq_id, new_id):
        """Let new_id begin as a copy of seq_id, sharing its blocks.

        Raises:  KeyError: seq_id is unknown;  ValueError: new_id already exists
        """
        self._known(seq_id)
        if new_id in self._blocks:
            raise ValueError(f"new_id {new_id!r} already exists")
        for block in self._blocks[seq_id]:
            self._owners[block] += 1
        self._blocks[new_id], self._lens[new_id] = list(self._blocks[seq_id]), self._lens[seq_id]

    def free(self, seq_id):
        """Forget a sequence; blocks nobody else owns return to the pool. KeyError if unknown."""
        blocks = self._blocks.pop(self._known(seq_id))
        del self._lens[seq_id]
        for block in reversed(blocks):
            self._release(block)

    def _layer(self, layer):
        layer = required_count("layer", layer, 0)
        if layer >= len(self._keys):
            raise IndexError(f"layer must be one of the cache's {len(self._keys)}, got {layer!r}")
        return layer

    def _known(self, seq_id):
        if seq_id not in self._blocks:
            raise KeyError(f"seq_id {seq_id!r} is not in the cache")
        return seq_id

    def _blocks_needed(self, seq_ids, counts):
        """How many blocks `_extend` will take for all of them."""
        block_size, new, writers = self.geometry.block_size, 0, Counter()
        for seq_id, count in zip(seq_ids, counts):
            blocks, start = self._blocks.get(seq_id, []), self._lens.get(seq_id, 0)
            new += ceil_div(start + count, block_size) - len(blocks)
            if count and start % block_size:
                writers[blocks[-1]] += 1
        # Of a block's owners each who writes to it gets a copy, but the last to own it keeps it.
        return new + sum(min(n, self._owners[block] - 1) for block, n in writers.items())

    def _extend(self, seq_id, count):
        """Slots of count more tokens, (count,), on the CPU; the blocks are there."""
        block_size = self.geometry.block_size
        blocks, start = list(self._blocks.get(seq_id, [])), self._lens.get(seq_id, 0)
        end = start + count
        if count and start % block_size and self._owners[blocks[-1]] > 1:
            blocks[-1] = self._copy_of(blocks[-1])
        blocks += [self._take() for _ in range(ceil_div(end, block_size) - len(blocks))]
        self._blocks[seq_id], self._lens[seq_id] = blocks, end
        positions = torch.arange(start, end, device="cpu")
        ids = torch.tensor(blocks, dtype=torch.int64, device="cpu")
        return ids[positions // block_size] * block_size + positions % block_size

    def _take(self):
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def _release(self, block):
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._free.append(block)

    def _copy_of(self, block):
        copy = self._take()
        self._keys[:, copy] = self._keys[:, block]
        self._values[:, copy] = self._values[:, block]
        self._release(block)
        return copy


def _check_slots(slot_mapping, num_slots):
    if not isinstance(slot_mapping, torch.Tensor):
        raise TypeError(f"slot_mapping must be a tensor, got {type(slot_mapping).__name__}")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")
    if slot_mapping.dim() != 1:
        raise ValueError(f"slot_mapping must be (num_tokens,), got {tuple(slot_mapping.shape)}")
    if len(slot_mapping) and int(slot_mapping.max()) >= num_slots:
        raise ValueError(
            f"slot_mapping must be below {num_slots}, the slots of the pool, "
            f"got {int(slot_mapping.max())}"
        )
