"""Shared prefixes: partitions whose keys and values many sequences read at once.

The sequences of a group begin with the same tokens, which lie in the same blocks. A partition
of these tokens is gathered once, and the query rows of all sequences that share it are the rows
of one matrix product. Its states go to where Phase 2 finds those of any other partition.

A sequence shares a partition only if each of its query tokens sees all of it. So a shared
partition needs no mask, and a key that a sequence doesn't see can't reach it through another one.
What its window or its newest tokens cut is the sequence's own. How it is cut depends on its own
length and on the length of its prefix, never on who else shares it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm import enough_rows
from .partition import (
    SharedItem,
    WorkItem,
    ceil_div,
    even_shares,
    first_needed,
    partitions,
    waves,
    whole_blocks,
)
from .shape import StepShape


class Prefixes(NamedTuple):
    """Which sequences begin with the same tokens.

    lens: of each group, the tokens of its prefix, in whole blocks
    group_of: of each sequence, its group, or -1
    """

    lens: list[int]
    group_of: list[int]


class Cut(NamedTuple):
    """How one sequence is cut. Its tokens are [first, end), and of these it shares [begin, stop).

    With a window, first is the beginning of the first block that a query token sees.
    """

    first: int
    begin: int
    stop: int
    end: int
    partition_size: int

    def own_items(self, seq: int, block_size: int) -> list[WorkItem]:
        """The partitions that the sequence reads alone."""
        before = partitions(seq, self.first, self.begin, self.partition_size, block_size)
        return before + partitions(seq, self.stop, self.end, self.partition_size, block_size)

    def state(self, start: int) -> int:
        """Which of the sequence's states is that of the partition from token `start` on."""
        number, size = 0, self.partition_size
        for first, end in ((self.first, self.begin), (self.begin, self.stop)):
            if start < end:
                return number + (start - first) // size
            number += ceil_div(end - first, size)
        return number + ceil_div(start - self.stop, size)

    @property
    def num_states(self) -> int:
        return self.state(self.end)


def cut_sequences(
    shape: StepShape, lengths: Sequence[int], partition_size: int, prefixes: Prefixes | None
) -> list[Cut]:
    """How an exact plan cuts its sequences."""
    cuts = []
    for seq, end in enumerate(lengths):
        first = begin = stop = first_needed(end, shape.q_len, shape.window, shape.block_size)
        group = -1 if prefixes is None else prefixes.group_of[seq]
        if prefixes is not None and group >= 0:
            # All query tokens see [seen_from, seen_to) of the prefix, which is cut at the same
            # tokens for all.
            prefix, seen_to = prefixes.lens[group], end - shape.q_len + 1
            seen_from = 0 if shape.window is None else max(0, end - shape.window)
            low = whole_blocks(seen_from, partition_size)
            high = prefix if prefix <= seen_to else seen_to // partition_size * partition_size
            if low < high:
                begin, stop = low, high
        cuts.append(Cut(first, begin, stop, end, partition_size))
    return cuts


def shared_waves(
    shape: StepShape, cuts: list[Cut], prefixes: Prefixes, wave_tokens: int
) -> list[list[SharedItem]]:
    """The partitions of all prefixes, in waves of equal width and of equally many sequences.

    Args:    wave_tokens: of a wave whose items have one sequence each
    """
    lanes, kv_heads = shape.num_kv_heads * shape.head_size, shape.num_kv_heads
    floats = wave_tokens * max(lanes, shape.num_rows)  # of a wave's K, or of its logits
    groups: dict[int, list[int]] = {}
    for seq, group in enumerate(prefixes.group_of):
        if group >= 0:
            groups.setdefault(group, []).append(seq)
    by_size: dict[int, list[SharedItem]] = {}
    for group, seqs in groups.items():
        end, size = prefixes.lens[group], cuts[seqs[0]].partition_size
        for start in range(0, end, size):
            width = min(size, end - start)
            all_seqs = [
                s for s in seqs if cuts[s].begin <= start and start + width <= cuts[s].stop
            ]
            most = max(1, floats // (width * shape.num_rows))
            for low, high in even_shares(len(all_seqs), ceil_div(len(all_seqs), most)):
                some = tuple(all_seqs[low:high])
                item = SharedItem(some[0], start, width, some)
                by_size.setdefault(len(some), []).append(item)
    return [
        wave
        for size, alike in by_size.items()
        for wave in waves(alike, floats // max(lanes, kv_heads * enough_rows(size * shape.group)))
    ]


class Sharing(NamedTuple):
    """The rows of a shared wave's matrices.

    A matrix is a pair of item and KV head. Its rows are, of each sequence in turn, those that the
    KV head serves. A row's bits must not depend on how many rows there are, so a matrix has at
    least 4. What is computed for the rows that are missing is nobody's.
    """

    rows: Tensor  # (matrices * group,), int64, among all rows of queries
    state_rows: Tensor  # (matrices * group,), int64. Nobody's states go past the last
    heads: Tensor  # (num_kv_heads * group,), int64, the query head of each row
    ends: Tensor  # (items, group, 1), float32, tokens from an item's start to a row's own position
    slots: Tensor  # (width,), float32: 0, 1, 2, ...

    @property
    def group(self) -> int:
        """Rows of a matrix."""
        return self.ends.shape[1]


def sharing(
    shape: StepShape,
    wave: list[SharedItem],
    cuts: list[Cut],
    first_states: Mapping[int, int],
    nobodys_state: int,
) -> Sharing:
    """The rows of one wave of shared items, on the CPU."""
    group, q_len, count = shape.group, shape.q_len, len(wave[0].seqs)
    rows, total = count * group, enough_rows(count * group)
    of_seqs = [
        (s, first_states[s] + cuts[s].state(item.start), cuts[s].num_states, cuts[s].end)
        for item in wave
        for s in item.seqs
    ]
    numbers = torch.tensor(of_seqs, dtype=torch.int64, device="cpu")
    # Each (items, 1, seqs of an item, 1):
    seqs, states, steps, ends = numbers.view(len(wave), 1, count, 4, 1).unbind(3)
    row = torch.arange(shape.num_rows, device="cpu").view(-1, 1, group)  # of a sequence
    queries = torch.zeros(len(wave), shape.num_kv_heads, total, dtype=torch.int64, device="cpu")
    state_rows = torch.full_like(queries, nobodys_state)
    queries[..., :rows] = (seqs * shape.num_rows + row).flatten(2)
    state_rows[..., :rows] = (states + row * steps).flatten(2)
    heads = queries[0] % shape.num_rows // q_len
    position = ends - q_len + torch.arange(group, device="cpu") % q_len
    starts = torch.tensor([item.start for item in wave], device="cpu").view(-1, 1, 1, 1)
    row_ends = torch.zeros(len(wave), total, 1, device="cpu", dtype=torch.float32)
    row_ends[:, :rows, 0] = (position - starts).flatten(1).float()
    slots = torch.arange(wave[0].width, dtype=torch.float32, device="cpu")
    return Sharing(queries.flatten(), state_rows.flatten(), heads.flatten(), row_ends, slots)
