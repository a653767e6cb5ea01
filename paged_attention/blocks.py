"""Blocks: which sequence owns which block of a pool. There are no tensors here.

A sequence is a list of block ids and a number of tokens. Several sequences may own one block, and
the owners of every block are counted. A block that nobody owns is free.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from paged_attention.kernel.checks import refuse, required_count
from paged_attention.kernel.partition import ceil_div


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than a step needs. Nothing was changed.

    Example:
        >>> from paged_attention import PagedKVCache
        >>> PagedKVCache(1, 16, 2, 64).extend("a", 17)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        paged_attention.blocks.OutOfBlocks: seq_ids ['a'] need 2 more blocks ... 1 of 1 are free
    """


class Sequence(NamedTuple):
    blocks: list[int]  # those of its tokens, and those that it has reserved for more
    num_tokens: int = 0
    first_position: int = 0  # of its first token, as a model that counts padding has it


class Blocks:
    """The owners of a pool's blocks. A lock is held while blocks change hands.

    Args:    num_blocks, block_size: of the pool. A block holds block_size tokens
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))[::-1]  # the last one is taken first
        self.lock = threading.RLock()
        self._owners = [0] * num_blocks
        self._sequences: dict[Hashable, Sequence] = {}

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, lock=threading.RLock())

    def sequence(self, seq_id: Hashable) -> Sequence:
        """Raises:  KeyError: seq_id is unknown"""
        if seq_id not in self._sequences:
            raise KeyError(f"seq_id {seq_id!r} is not in the cache")
        return self._sequences[seq_id]

    def reserve(self, seq_ids: list[Hashable], counts: list[int]) -> list[tuple[int, int]]:
        """Give sequences the blocks of counts more tokens. They don't become longer yet.

        Returns: (block, its copy), for each shared block that a sequence is about to write to
        Raises:  OutOfBlocks: there are too few for all of them. Nothing is changed
        """
        needed = self._needed(seq_ids, counts)
        if needed > len(self.free):
            raise OutOfBlocks(
                f"seq_ids {seq_ids!r} need {needed} more blocks for num_tokens={counts}, "
                f"but only {len(self.free)} of {self.num_blocks} are free"
            )
        copies = []
        for seq_id, count in zip(seq_ids, counts):
            old = self._sequences.get(seq_id, Sequence([]))
            start, blocks = old.num_tokens, list(old.blocks)
            last, offset = divmod(start, self.block_size)
            if count and offset and self._owners[blocks[last]] > 1:
                copies.append((blocks[last], self._take()))
                self._release(blocks[last])
                blocks[last] = copies[-1][1]
            more = ceil_div(start + count, self.block_size) - len(blocks)
            blocks += [self._take() for _ in range(more)]
            self._sequences[seq_id] = old._replace(blocks=blocks)
        return copies

    def advance(self, seq_ids: list[Hashable], counts: list[int], firsts: list[int]) -> None:
        """Count tokens for which blocks were reserved.

        Args:    firsts: the position of each sequence's first token

        Raises:  ValueError: a sequence has no blocks for them. Nothing is changed
        """
        old = [self.sequence(seq_id) for seq_id in seq_ids]
        for seq_id, count, (blocks, start, _) in zip(seq_ids, counts, old):
            if start + count > len(blocks) * self.block_size:
                refuse("num_tokens", f"what was reserved for {seq_id!r}", count)
        for seq_id, count, (blocks, start, _), first in zip(seq_ids, counts, old, firsts):
            self._sequences[seq_id] = Sequence(blocks, start + count, first)

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Forget the tokens past the first num_tokens, and the blocks that held only those."""
        blocks, have, first = self.sequence(seq_id)
        num_tokens = required_count("num_tokens", num_tokens, 0)
        if num_tokens > have:
            refuse("num_tokens", f"at most the sequence's {have}", num_tokens)
        kept = ceil_div(num_tokens, self.block_size)
        self._sequences[seq_id] = Sequence(blocks[:kept], num_tokens, first if num_tokens else 0)
        for block in reversed(blocks[kept:]):
            self._release(block)

    def fork(self, seq_id: Hashable, new_id: Hashable) -> None:
        """Let new_id own the blocks that hold seq_id's tokens, too."""
        blocks, have, first = self.sequence(seq_id)
        if new_id in self._sequences:
            refuse("new_id", "new to the cache", repr(new_id))
        shared = blocks[: ceil_div(have, self.block_size)]
        for block in shared:
            self._owners[block] += 1
        self._sequences[new_id] = Sequence(shared, have, first)

    def remove(self, seq_id: Hashable) -> None:
        """Forget a sequence."""
        self.truncate(seq_id, 0)
        del self._sequences[seq_id]

    def _needed(self, seq_ids: list[Hashable], counts: list[int]) -> int:
        """How many blocks `reserve` will take for all of them."""
        new, writers = 0, Counter()
        for seq_id, count in zip(seq_ids, counts):
            blocks, start, _ = self._sequences.get(seq_id, Sequence([]))
            last, offset = divmod(start, self.block_size)
            new += max(0, ceil_div(start + count, self.block_size) - len(blocks))
            if count and offset:
                writers[blocks[last]] += 1
        # Every owner that writes to a shared block gets a copy, but the last one keeps the block.
        return new + sum(min(n, self._owners[block] - 1) for block, n in writers.items())

    def _take(self) -> int:
        block = self.free.pop()
        self._owners[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self.free.append(block)
