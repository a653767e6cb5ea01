"""Which sequences of a pool begin with the same blocks, and whether it pays to read them once."""

from __future__ import annotations

from collections.abc import Sequence as Numbers
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attention.blocks import Sequence


class Group(NamedTuple):
    """Rows of a block table that begin with the same blocks."""

    num_blocks: int
    rows: list[int]

    @property
    def saved(self) -> int:
        """Blocks that need not be read."""
        return self.num_blocks * (len(self.rows) - 1)


Interval = tuple[int, list[Group], list[int]]  # blocks in common, groups, rows in none of them


class SharedPrefixes(NamedTuple):
    """The groups of a step, in the order in which `shared_prefix_attention` takes them.

    prefix_tables: (num_groups, blocks), int32
    prefix_lens: (num_groups,), int32, on the CPU, tokens of whole blocks
    suffix_tables: (num_seqs, blocks), int32
    suffix_lens: (num_seqs,), int32, on the CPU, tokens
    group_of: (num_seqs,), int32, on the CPU, a sequence's group, or -1
    """

    prefix_tables: Tensor
    prefix_lens: Tensor
    suffix_tables: Tensor
    suffix_lens: Tensor
    group_of: Tensor


def pays(num_tokens: int, num_seqs: int) -> bool:
    """Whether a step gets faster if these sequences read so many tokens once.

    A shared prefix is one more partition for each sequence, and one more wave.
    """
    return num_tokens >= 64 and num_tokens * (num_seqs - 1) >= 768


def shared_prefixes(
    sequences: Numbers[Sequence], block_size: int, device: torch.device
) -> SharedPrefixes:
    """The groups of sequences that begin alike, chosen so that few tokens are left to read.

    Args:    sequences: of one pool. Blocks of the same id hold the same tokens
    """
    whole = [blocks[: num_tokens // block_size] for blocks, num_tokens, _ in sequences]
    groups = _groups(whole, block_size)
    group_of, prefix = [-1] * len(whole), [0] * len(whole)
    for group, (num_blocks, members) in enumerate(groups):
        for seq in members:
            group_of[seq], prefix[seq] = group, num_blocks
    prefixes = [whole[members[0]][:num_blocks] for num_blocks, members in groups]
    suffixes = [sequence.blocks[n:] for sequence, n in zip(sequences, prefix)]
    suffix_lens = [s.num_tokens - n * block_size for s, n in zip(sequences, prefix)]
    return SharedPrefixes(
        table_of(prefixes, device),
        _int32([num_blocks * block_size for num_blocks, _ in groups]),
        table_of(suffixes, device),
        _int32(suffix_lens),
        _int32(group_of),
    )


def table_of(rows: Numbers[list[int]], device: torch.device) -> Tensor:
    """A block table, (rows, most blocks of a row), int32. Shorter rows are padded with -1."""
    longest = max(map(len, rows), default=0)
    padded = [blocks + [-1] * (longest - len(blocks)) for blocks in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(rows), longest)


def _groups(rows: list[list[int]], block_size: int) -> list[Group]:
    """Disjoint groups of rows that begin alike.

    In sorted order, rows that begin alike are neighbours. So what may become a group is an
    interval, and two intervals lie one inside of the other or apart. A stack holds those that are
    open. One closes where the next row has less in common with it.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    common = [_common(rows[a], rows[b]) for a, b in zip(order, order[1:])]
    still_open: list[Interval] = [(0, [], [])]
    for row, blocks in zip(order, [*common, 0]):
        groups, loose = [], [row]
        while still_open[-1][0] > blocks:
            depth, inside, others = still_open.pop()
            groups, loose = _closed(depth, inside + groups, others + loose, block_size)
        depth, inside, others = still_open[-1]
        if depth < blocks:
            still_open.append((blocks, groups, loose))
        else:
            still_open[-1] = depth, inside + groups, others + loose
    return still_open[0][1]


def _closed(
    depth: int, groups: list[Group], loose: list[int], block_size: int
) -> tuple[list[Group], list[int]]:
    """The groups of an interval, and the rows that are in none.

    The rows that are in none so far become a group of `depth` blocks, if that pays. So does a
    group inside of the interval whose own blocks save less.
    """
    kept = [group for group in groups if group.saved >= len(group.rows) * depth]
    others = [row for group in groups if group not in kept for row in group.rows]
    new = Group(depth, loose + others)
    before, after = (sum(g.saved for g in some) for some in (groups, [*kept, new]))
    if after >= before and pays(depth * block_size, len(new.rows)):
        return [*kept, new], []
    return groups, loose


def _common(a: list[int], b: list[int]) -> int:
    """How many blocks two rows begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low], and they differ before high + 1
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")
