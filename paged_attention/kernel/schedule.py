"""The schedule of a decode step: its lengths as waves and segments, as tensors and sizes.

Everything that shapes depend on is settled here, on the host, once a step. `execute.py` runs the
schedule for every layer and decides nothing.
"""

from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm import padded, room_for
from .partition import SharedItem, WorkItem, waves
from .shape import StepShape
from .sharing import Cut, Prefixes, Sharing, cut_sequences, shared_waves, sharing


class Wave(NamedTuple):
    """Work items of one width, which are gathered and reduced together.

    The query rows of an item are those of one sequence, or as `sharing` says.
    """

    num_items: int
    width: int
    items: slice  # among all of the schedule's items
    blocks: slice  # among all of the schedule's blocks
    seqs: Tensor  # (items,), int64, the sequence of each item
    state_rows: Tensor  # (matrices * group,), int64, where the items' states belong
    group: int  # rows of a matrix, which is a pair of item and KV head
    # Tokens from a slot to its sequence's end: the sequence's length less the slot's position.
    min_tokens_from_last_slot: int  # the smallest over the wave, 0 or less where an item overhangs
    max_tokens_from_first_slot: int  # the largest over the wave
    sharing: Sharing | None = None


class Segment(NamedTuple):
    """Sequences of equally many partitions, which one merge serves.

    They are adjacent in the order of the merge, and so are their states.
    """

    first_row: int
    num_rows: int
    first_state: int
    num_states: int  # of each row


class ItemTable(NamedTuple):
    """One column for each work item, in the order of the waves. Each is (items,), int64."""

    seqs: Tensor
    starts: Tensor  # tokens. Of a capacity schedule, from the first one needed
    tokens_to_end: Tensor  # from an item's start to its sequence's end
    first_columns: Tensor  # of the block table
    first_states: Tensor  # where the state of row 0 belongs
    state_steps: Tensor  # from a row's state to the next row's


class Extent(NamedTuple):
    """How many sequences, states, blocks and items a schedule has, and its largest wave."""

    num_seqs: int
    num_states: int
    num_blocks: int
    num_items: int
    wave_items: int
    wave_tokens: int  # each item's width is first rounded up, as its logits' columns are
    widest: int  # tokens of the widest item
    shared_rows: int  # of the matrices of a shared wave, the most
    shared_logits: int  # of a shared wave, the most
    is_sorted: bool  # the merge takes the sequences in the batch's order
    is_capacity: bool


class Schedule:
    """The waves and segments of a batch of these lengths.

    Only blocks that some query sees are in it.

    Args:    lengths: tokens of each sequence. If is_capacity, the most that each may have: the
                   true lengths, and so where a window begins, are then read on the device
             partition_size: tokens, a multiple of the block size
             wave_tokens: the most tokens of a wave
             prefixes: which sequences begin with the same tokens, or None
    """

    def __init__(
        self,
        shape: StepShape,
        lengths: Sequence[int],
        partition_size: int,
        wave_tokens: int,
        *,
        is_capacity: bool,
        device: torch.device,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.shape, self.is_capacity, self.device = shape, is_capacity, device
        self.num_seqs, self.longest = len(lengths), max(lengths, default=0)
        if is_capacity:
            most = self.longest if shape.window is None else shape.tokens_near_window
            cuts = [Cut(0, 0, 0, min(length, most), partition_size) for length in lengths]
        else:
            cuts = cut_sequences(shape, lengths, partition_size, prefixes)
        num_states = [cut.num_states for cut in cuts]
        # The merge takes sequences of most partitions first.
        self.order = sorted(range(len(lengths)), key=num_states.__getitem__, reverse=True)
        is_sorted = self.order == sorted(self.order)
        self.inverse = None if is_sorted else _int64(self.order).argsort().to(device)
        self.segments, first_states = _segments(self.order, num_states, shape.num_rows)

        shared = [] if prefixes is None else shared_waves(shape, cuts, prefixes, wave_tokens)
        own = [item for seq, c in enumerate(cuts) for item in c.own_items(seq, shape.block_size)]
        cut = [*shared, *waves(own, wave_tokens)]
        columns = [
            (
                item.seq,
                item.start,
                cuts[item.seq].end - item.start,
                item.start // shape.block_size,
                first_states[item.seq] + cuts[item.seq].state(item.start),
                num_states[item.seq],
            )
            for item in chain.from_iterable(cut)
        ]
        table = _int64(columns).view(-1, 6).t()
        self.block_seqs, self.block_columns = _blocks(cut, table, shape.block_size).to(device)
        self.items = ItemTable(*table.contiguous().to(device))

        self.widest = max((wave[0].width for wave in cut), default=0)
        self._make_ranges()
        # Padding rows of shared waves have a state, too, for which there is one place.
        own_states = sum(num_states) * shape.num_rows
        sharings = [sharing(shape, wave, cuts, first_states, own_states) for wave in shared]
        self.waves = self._waves(cut, cuts)
        for i, rows in enumerate(sharings):
            rows = Sharing(*(x.to(device) for x in rows))
            more = {"group": rows.group, "state_rows": rows.state_rows, "sharing": rows}
            self.waves[i] = self.waves[i]._replace(**more)
        totals = len(lengths), own_states + bool(shared), len(self.block_seqs), len(columns)
        wave_items = max((wave.num_items for wave in self.waves), default=0)
        most_tokens = max((wave.num_items * padded(wave.width) for wave in self.waves), default=0)
        rows = [max(len(w.state_rows), room_for(1) * w.group) for w in self.waves[: len(shared)]]
        logits = [count * padded(wave[0].width) for count, wave in zip(rows, shared)]
        of_a_wave = wave_items, most_tokens, self.widest
        of_shared = max(rows, default=0), max(logits, default=0)
        self.extent = Extent(*totals, *of_a_wave, *of_shared, is_sorted, is_capacity)

    def _make_ranges(self) -> None:
        """Constants that every run reads."""
        shape, widest, device = self.shape, self.widest, self.device
        count = max(widest + shape.q_len, shape.block_size, shape.num_rows)
        self.arange = torch.arange(count, device=device)  # 0, 1, 2, ...
        self.ones = torch.ones(widest, 1, dtype=torch.float32, device=device)
        self.slot_offsets = self.arange[: shape.block_size]
        self.kv_head_ids = self.arange[: shape.num_kv_heads].view(-1, 1, 1)
        # The distance from a key to the query of a row is tokens_to_end - distance_offsets, with
        # distance_offsets[row, slot] = slot + q_len - row.
        self.distance_offsets = self.arange.as_strided((shape.q_len, widest), (1, 1), 1)
        if shape.q_len > 1:
            self.distance_offsets = self.distance_offsets.flip(0)

    def _waves(self, cut: list[list[WorkItem | SharedItem]], cuts: list[Cut]) -> list[Wave]:
        shape, items = self.shape, self.items
        # A row's states lie side by side: the next partition's is the next one.
        steps = items.state_steps.unsqueeze(1) * self.arange[: shape.num_rows]
        state_rows = items.first_states.unsqueeze(1) + steps
        result, first, block = [], 0, 0
        for wave in cut:
            width = wave[0].width
            of_items = slice(first, first + len(wave))
            of_blocks = slice(block, block + len(wave) * width // shape.block_size)
            first, block = of_items.stop, of_blocks.stop
            to_end = [cuts[item.seq].end - item.start for item in wave]
            least = 1 if self.is_capacity else min(to_end) + 1
            seqs, rows = items.seqs[of_items], state_rows[of_items].view(-1)
            tokens_left = least - width, max(to_end)
            places = of_items, of_blocks, seqs, rows
            result.append(Wave(len(wave), width, *places, shape.group, *tokens_left))
        return result


def _segments(
    order: list[int], num_states: list[int], num_rows: int
) -> tuple[list[Segment], dict[int, int]]:
    """The segments, and of each sequence the first of its states."""
    segments, first_states, row, state = [], {}, 0, 0
    for count, seqs in groupby(order, key=num_states.__getitem__):
        first_row, first_state = row, state
        for seq in seqs:
            first_states[seq] = state
            row, state = row + num_rows, state + count * num_rows
        segments.append(Segment(first_row, row - first_row, first_state, count))
    return segments, first_states


def _blocks(cut: list[list[WorkItem | SharedItem]], table: Tensor, block_size: int) -> Tensor:
    """(2, blocks): of each block, in the order of the waves, its sequence and table column."""
    counts = [item.width // block_size for wave in cut for item in wave]
    num_blocks, total = _int64(counts), sum(counts)
    of_block = table.repeat_interleave(num_blocks, dim=1, output_size=total)
    within = torch.arange(total, device="cpu")  # then: blocks before it in its item
    before = num_blocks.cumsum(0) - num_blocks
    within -= before.repeat_interleave(num_blocks, output_size=total)
    return torch.stack([of_block[0], of_block[3] + within])


def _int64(numbers: list) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
