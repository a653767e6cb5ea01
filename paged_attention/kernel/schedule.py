"""The schedule of a decode step: its lengths as waves and segments, as tensors and sizes.

Everything that shapes depend on is settled here, on the host, once a step. `execute.py` runs the
schedule for every layer and decides nothing.
"""

from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .gemm import padded
from .partition import WorkItem, ceil_div, first_needed, waves, work_items
from .shape import StepShape


class Wave(NamedTuple):
    """Work items of one width, which are gathered and reduced together."""

    num_items: int
    width: int
    items: slice  # among all of the schedule's items
    blocks: slice  # among all of the schedule's blocks
    seqs: Tensor  # (items,), int64, the sequence of each item
    state_rows: Tensor  # (items * num_rows,), int64, where the items' states belong
    # Tokens from a slot to its sequence's end: the sequence's length less the slot's position.
    min_tokens_from_last_slot: int  # the smallest over the wave, 0 or less where an item overhangs
    max_tokens_from_first_slot: int  # the largest over the wave


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
    starts: Tensor  # tokens from the first one needed
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
    is_sorted: bool  # the merge takes the sequences in the batch's order
    is_capacity: bool


class Schedule:
    """The waves and segments of a batch of these lengths.

    Only blocks that some query sees are in it.

    Args:    lengths: tokens of each sequence. If is_capacity, the most that each may have: the
                   true lengths, and so where a window begins, are then read on the device
             partition_size: tokens, a multiple of the block size
             wave_tokens: the most tokens of a wave
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
    ) -> None:
        self.shape, self.is_capacity, self.device = shape, is_capacity, device
        self.num_seqs, self.longest = len(lengths), max(lengths, default=0)
        firsts, spans = _needed(shape, lengths, is_capacity)
        num_states = [ceil_div(span, partition_size) for span in spans]
        # The merge takes sequences of most partitions first.
        self.order = sorted(range(len(lengths)), key=num_states.__getitem__, reverse=True)
        is_sorted = self.order == sorted(self.order)
        self.inverse = None if is_sorted else _int64(self.order).argsort().to(device)
        self.segments, first_states = _segments(self.order, num_states, shape.num_rows)

        cut = waves(work_items(spans, partition_size, shape.block_size), wave_tokens)
        columns = [
            (
                item.seq,
                item.start,
                spans[item.seq] - item.start,
                (firsts[item.seq] + item.start) // shape.block_size,
                first_states[item.seq] + item.start // partition_size,
                num_states[item.seq],
            )
            for item in chain.from_iterable(cut)
        ]
        table = _int64(columns).view(-1, 6).t()
        self.block_seqs, self.block_columns = _blocks(cut, table, shape.block_size).to(device)
        self.items = ItemTable(*table.contiguous().to(device))

        self.widest = max((wave[0].width for wave in cut), default=0)
        self._make_ranges()
        self.waves = self._waves(cut, spans)
        totals = len(lengths), sum(num_states) * shape.num_rows, len(self.block_seqs), len(columns)
        wave_items = max((wave.num_items for wave in self.waves), default=0)
        most_tokens = max((wave.num_items * padded(wave.width) for wave in self.waves), default=0)
        of_a_wave = wave_items, most_tokens, self.widest
        self.extent = Extent(*totals, *of_a_wave, is_sorted, is_capacity)

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

    def _waves(self, cut: list[list[WorkItem]], spans: Sequence[int]) -> list[Wave]:
        shape, items = self.shape, self.items
        # A row's states lie side by side: the next partition's is the next one.
        steps = items.state_steps.unsqueeze(1) * self.arange[: shape.num_rows]
        state_rows = items.first_states.unsqueeze(1) + steps
        result, item, block = [], 0, 0
        for wave in cut:
            width = wave[0].width
            of_items = slice(item, item + len(wave))
            of_blocks = slice(block, block + len(wave) * width // shape.block_size)
            item, block = of_items.stop, of_blocks.stop
            to_end = [spans[seq] - start for seq, start, _ in wave]
            least = 1 if self.is_capacity else min(to_end) + 1
            seqs, rows = items.seqs[of_items], state_rows[of_items].view(-1)
            tokens_left = least - width, max(to_end)
            result.append(Wave(len(wave), width, of_items, of_blocks, seqs, rows, *tokens_left))
        return result


def _needed(
    shape: StepShape, lengths: Sequence[int], is_capacity: bool
) -> tuple[list[int], list[int]]:
    """Of each sequence the first token of the first block needed, and the tokens from there on."""
    if is_capacity:
        longest = max(lengths, default=0)
        most = longest if shape.window is None else shape.tokens_near_window
        return [0] * len(lengths), [min(length, most) for length in lengths]
    firsts = [first_needed(n, shape.q_len, shape.window, shape.block_size) for n in lengths]
    return firsts, [length - first for length, first in zip(lengths, firsts)]


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


def _blocks(cut: list[list[WorkItem]], table: Tensor, block_size: int) -> Tensor:
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
