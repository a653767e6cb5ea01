"""The schedule of a decode step: its lengths as waves and segments, as tensors and sizes.

Everything that shapes depend on is settled here, on the host, once a step; `stream.py` runs it for
every layer and decides nothing.
"""

from itertools import chain, groupby
from typing import NamedTuple

import torch

from paged_attention.kernel.merge import aligned
from paged_attention.kernel.partition import ceil_div, first_needed, waves, work_items
from paged_attention.kernel.workspace import Buffers


class Heads(NamedTuple):
    """What of a decode step's shape doesn't depend on its lengths."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype  # of the caches
    q_len: int  # query tokens of a sequence
    window: int | None  # keys that a query sees

    @property
    def num_rows(self):
        """Pairs of query head and query token: what attention is computed for."""
        return self.num_heads * self.q_len

    @property
    def lanes(self):
        """Floats from one row of queries, K or V in the workspace to the next."""
        return aligned(self.head_size)

    @property
    def as_stored(self):
        """Whether K and V can be used as they are in the caches, row by row."""
        return self.dtype == torch.float32 and self.lanes == self.head_size

    @property
    def reach(self):
        """Tokens that a windowed sequence needs at most: those in sight, and what precedes them
        in their first block."""
        return self.window + self.q_len - 1 + self.block_size - 1


class Wave(NamedTuple):
    """Work items of one width; the tensors are on the device."""

    num_items: int
    width: int
    items: slice  # among all of the schedule's
    blocks: slice  # likewise
    seqs: torch.Tensor  # (items,), int64
    state_rows: torch.Tensor  # (items * num_rows,), int64, where their states belong
    least: int  # tokens from an item's last slot to its sequence's end, both included, at least;
    most: int  # from its first slot, at most


class Segment(NamedTuple):
    """Sequences of equally many partitions. They are adjacent in the order of the merge, and so
    are their states, num_states for each of num_rows rows of theirs."""

    first_row: int
    num_rows: int
    first_state: int
    num_states: int


class Schedule:
    """A batch of these lengths, as stream.run takes it.

    Only blocks that some query sees are in it.

    Args:    lengths: list of int, tokens; with `static`, the most that any may have
             static: whether the lengths are bounds, and the true ones are read on the device:
                   where a window begins then, too
             partition_size: tokens, a multiple of the block size
             wave_tokens: the most tokens of a wave
    """

    def __init__(self, lengths, static, heads, partition_size, wave_tokens, device):
        self.heads, self.static = heads, static
        self.num_seqs, self.longest = len(lengths), max(lengths, default=0)
        if static:
            firsts = [0] * len(lengths)
            most = self.longest if heads.window is None else heads.reach
            spans = [min(length, most) for length in lengths]
        else:
            of_heads = heads.q_len, heads.window, heads.block_size
            firsts = [first_needed(length, *of_heads) for length in lengths]
            spans = [length - first for length, first in zip(lengths, firsts)]
        num_states = [ceil_div(span, partition_size) for span in spans]
        order = sorted(range(len(lengths)), key=num_states.__getitem__, reverse=True)  # stable
        self.order = order  # of the sequences, in the merge
        self.inverse = None if order == sorted(order) else _tensor(order).argsort().to(device)
        self.segments, first_state = _segments(order, num_states, heads.num_rows)
        self.num_states = sum(num_states) * heads.num_rows

        cut = waves(work_items(spans, partition_size, heads.block_size), wave_tokens)
        numbers = [
            (
                seq,
                start,
                spans[seq] - start,
                (firsts[seq] + start) // heads.block_size,
                first_state[seq] + start // partition_size,
                num_states[seq],
            )
            for seq, start, _ in chain.from_iterable(cut)
        ]
        numbers = _tensor(numbers).view(-1, 6).t()
        # Of every block, in the order of the waves: its sequence, and its column of the table.
        num_blocks = _tensor([item.width // heads.block_size for wave in cut for item in wave])
        of_block = numbers.repeat_interleave(num_blocks, dim=1)
        within = torch.arange(of_block.shape[1], device="cpu")
        within -= (num_blocks.cumsum(0) - num_blocks).repeat_interleave(num_blocks)
        blocks = torch.stack([of_block[0], of_block[3] + within]).to(device)
        self.block_seqs, self.block_columns = blocks
        numbers = numbers.contiguous().to(device)
        self.seqs, self.starts, self.left, _, first, step = numbers  # each (items,)

        self.widest = max((wave[0].width for wave in cut), default=0)
        count = max(self.widest + heads.q_len, heads.block_size, heads.num_rows)
        self.counting = torch.arange(count, device=device)  # 0, 1, 2, ...
        self.ones = torch.ones(self.widest, 1, dtype=torch.float32, device=device)
        self.slots = self.counting[: heads.block_size]
        self.kv_heads = self.counting[: heads.num_kv_heads].view(-1, 1, 1)
        # A key lies `left - (slot + q_len - row)` behind the query of a row; (q_len, widest).
        self.offsets = self.counting.as_strided((heads.q_len, self.widest), (1, 1), 1)
        if heads.q_len > 1:
            self.offsets = self.offsets.flip(0)
        # A row of the merge has its states side by side: a step of 1 from partition to partition,
        # of the number of partitions from one to the next of a sequence's rows.
        rows = self.counting[: heads.num_rows]
        state_rows = first.unsqueeze(1) + step.unsqueeze(1) * rows  # (items, num_rows)
        self.waves, item, block = [], 0, 0
        for wave in cut:
            width = wave[0].width
            items = slice(item, item + len(wave))
            blocks = slice(block, block + len(wave) * width // heads.block_size)
            item, block = items.stop, blocks.stop
            rows = state_rows[items].view(-1)
            left = [spans[seq] - start for seq, start, _ in wave]
            least = 1 - width if static else min(left) - width + 1
            self.waves.append(
                Wave(len(wave), width, items, blocks, self.seqs[items], rows, least, max(left))
            )
        self.buffers = Buffers(self._sizes())

    def _sizes(self):
        """name -> (dtype, elements) of every intermediate; a wave's are as large as any wave's."""
        num_heads, num_kv_heads, head_size, block_size, dtype, q_len, _ = self.heads
        num_rows, lanes, state = self.heads.num_rows, self.heads.lanes, aligned(head_size + 1)
        group = num_rows // num_kv_heads
        items = max((wave.num_items for wave in self.waves), default=0)
        tokens = max((wave.num_items * wave.width for wave in self.waves), default=0)
        matrices = max(2, items * num_kv_heads)  # batched_gemm wants room for two
        logits = group * max(2 * self.widest, tokens * num_kv_heads)
        rows = self.num_seqs * num_rows
        moved = 0 if self.inverse is None else rows
        sizes = {
            "query": (torch.float32, rows * lanes),
            "wave_query": (torch.float32, items * num_rows * lanes),
            "kv": (torch.float32, tokens * num_kv_heads * lanes),
            "logits": (torch.float32, logits),
            "wave_m": (torch.float32, matrices * group),
            "wave_s": (torch.float32, matrices * group),
            "wave_acc": (torch.float32, matrices * group * lanes),
            "acc_s": (torch.float32, self.num_states * state),
            "m": (torch.float32, self.num_states),
            "weights": (torch.float32, self.num_states),
            "merged_acc_s": (torch.float32, (rows + 1) * state),
            "merged_m": (torch.float32, rows),
            "sorted_acc_s": (torch.float32, moved * state),
            "sorted_m": (torch.float32, moved),
            "empty": (torch.bool, rows),
            "slopes": (torch.float32, num_heads),
            "sinks": (torch.float32, num_heads),
            "scale": (torch.float32, num_kv_heads),
            "sink_m": (torch.float32, rows),
            "sink_s": (torch.float32, rows),
            "places": (torch.int64, len(self.block_seqs)),
            "table_ids": (torch.int64, len(self.block_seqs)),
            "block_ids": (torch.int64, len(self.block_seqs)),
            "row_ids": (torch.int64, tokens * num_kv_heads),
            "key_offsets": (torch.int64, num_kv_heads * block_size),
            "value_offsets": (torch.int64, num_kv_heads * block_size),
            "behind": (torch.int64, tokens * q_len),
            "seen": (torch.int64, tokens * q_len),
            "distance": (torch.float32, tokens * q_len),
            "hidden": (torch.bool, tokens * q_len),
            "dead": (torch.bool, tokens),
        }
        if not self.heads.as_stored:
            raw = torch.uint8 if dtype.itemsize == 1 else dtype
            sizes["raw"] = raw, tokens * num_kv_heads * head_size
        if dtype.itemsize == 1:
            sizes["half"] = torch.int16, tokens * num_kv_heads * head_size
        if self.static:
            sizes["seq_lens"] = torch.int64, self.num_seqs
            sizes["too_long"] = torch.bool, self.num_seqs
            sizes["left"] = torch.int64, len(self.seqs)
            sizes["dead_blocks"] = torch.bool, len(self.block_seqs)
            sizes["first_blocks"] = torch.int64, self.num_seqs
            sizes["columns"] = torch.int64, len(self.block_seqs)
        return sizes


def _segments(order, num_states, num_rows):
    """The segments, and for each sequence the first of its states."""
    segments, first_state, row, state = [], {}, 0, 0
    for count, seqs in groupby(order, key=num_states.__getitem__):
        first = row, state
        for seq in seqs:
            first_state[seq] = state
            row, state = row + num_rows, state + count * num_rows
        segments.append(Segment(first[0], row - first[0], first[1], count))
    return segments, first_state


def _tensor(numbers):
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
