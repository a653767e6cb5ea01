"""The schedule of a decode step: lengths as work items, waves, segments and buffers.

Everything that shapes depend on is settled here, on the host, once a step; `stream.py` then runs
it for every layer and decides nothing.
"""

from itertools import chain, groupby
from typing import NamedTuple

import torch

from .partition import ceil_div, waves, work_items
from .workspace import Buffers


class Heads(NamedTuple):
    """What of a decode step's shape doesn't depend on its lengths."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype  # of the caches


class Wave(NamedTuple):
    """Work items of one width; the tensors are on the device."""

    width: int
    items: slice  # among all of the schedule's
    seqs: torch.Tensor  # (items,), int64
    state_rows: torch.Tensor  # (items * num_heads,), int64, where their states belong
    ragged: bool  # whether an item may end within a block, or before it begins


class Segment(NamedTuple):
    """Sequences of equally many partitions. They are adjacent in the order of the merge, and so
    are their states, num_states for each of num_rows pairs of sequence and query head."""

    first_row: int
    num_rows: int
    first_state: int
    num_states: int


class Schedule:
    """Tensors and sizes for a batch of these lengths.

    Args:    lengths: list of int, tokens; with `static`, the most that any may have
             static: whether the lengths are bounds, and the true ones are read from the device
             partition_size: tokens, a multiple of the block size
             wave_tokens: the most tokens of a wave
    """

    def __init__(self, lengths, static, heads, partition_size, wave_tokens, device):
        self.heads, self.static = heads, static
        num_heads, block_size = heads.num_heads, heads.block_size
        num_states = [ceil_div(length, partition_size) for length in lengths]
        order = sorted(range(len(lengths)), key=num_states.__getitem__, reverse=True)  # stable
        in_order = order == list(range(len(lengths)))
        self.inverse = None if in_order else _tensor(order, device).argsort()

        self.segments, first_state_of, row, state = [], {}, 0, 0
        for count, seqs in groupby(order, key=num_states.__getitem__):
            segment_row, segment_state = row, state
            for seq in seqs:
                first_state_of[seq] = state
                row, state = row + num_heads, state + count * num_heads
            segment = Segment(segment_row, row - segment_row, segment_state, count)
            self.segments.append(segment)
        self.num_states = state

        cut = waves(work_items(lengths, partition_size, block_size), wave_tokens)
        items = list(chain.from_iterable(cut))
        self.longest = max((item.start + item.width for item in items), default=0)
        # Each (items,): sequence, start, first column of the block table, tokens left from there.
        columns = [
            (seq, start, start // block_size, lengths[seq] - start) for seq, start, _ in items
        ]
        self.seqs, self.starts, self.columns, self.left = (
            _tensor(columns, device).view(-1, 4).t().contiguous()
        )
        # A row of the merge has its states side by side: a step of 1 from partition to partition,
        # of the number of partitions from query head to query head.
        first = [first_state_of[seq] + start // partition_size for seq, start, _ in items]
        step = [num_states[seq] for seq, _, _ in items]
        state_rows = torch.arange(num_heads, device="cpu") * _tensor(step).unsqueeze(1)
        state_rows = (state_rows + _tensor(first).unsqueeze(1)).to(device)  # (items, num_heads)
        self.waves, first = [], 0
        for wave in cut:
            width, some = wave[0].width, slice(first, first + len(wave))
            ragged = static or any(lengths[seq] - start < width for seq, start, _ in wave)
            rows = state_rows[some].view(-1)
            self.waves.append(Wave(width, some, self.seqs[some], rows, ragged))
            first += len(wave)

        widest = max((wave.width for wave in self.waves), default=1)
        self.tokens = torch.arange(max(widest, block_size), device=device)
        self.ones = torch.ones(widest, 1, dtype=torch.float32, device=device)
        self.kv_heads = torch.arange(heads.num_kv_heads, device=device).view(-1, 1, 1)
        self.buffers = Buffers(self._shapes(len(lengths), len(items)))

    def _shapes(self, num_seqs, num_items):
        """name -> (dtype, shape) of every intermediate; a wave's are as large as any wave's."""
        num_heads, num_kv_heads, head_size, block_size, dtype = self.heads
        group = num_heads // num_kv_heads
        most = max((len(wave.seqs) for wave in self.waves), default=0)
        most_tokens = max((len(wave.seqs) * wave.width for wave in self.waves), default=0)
        matrices = max(2, most * num_kv_heads)  # batched_gemm wants room for two
        logits = max(
            (max(2, len(wave.seqs) * num_kv_heads) * wave.width for wave in self.waves), default=0
        )
        rows = num_seqs * num_heads
        floats = {
            "query": (num_seqs, num_heads, head_size),
            "wave_query": (most, num_heads, head_size),
            "kv": (most_tokens * num_kv_heads * head_size,),
            "logits": (logits * group,),
            "wave_m": (matrices, group, 1),
            "wave_s": (matrices, group, 1),
            "wave_acc": (matrices, group, head_size),
            "acc_s": (self.num_states, head_size + 1),
            "m": (self.num_states,),
            "merged_acc_s": (rows + 1, 1, head_size + 1),
            "merged_m": (rows,),
            "sorted_acc_s": (0 if self.inverse is None else rows, head_size + 1),
            "sorted_m": (0 if self.inverse is None else rows,),
        }
        longs = {
            "seq_lens": (num_seqs,),
            "left": (num_items,),
            "first": (num_items,),
            "places": (most_tokens // block_size,),
            "block_ids": (most_tokens // block_size,),
            "key_offsets": (num_kv_heads * block_size,),
            "value_offsets": (num_kv_heads * block_size,),
            "row_ids": (most_tokens * num_kv_heads,),
        }
        bools = {
            "dead": (most_tokens,),
            "dead_blocks": (most_tokens // block_size,),
            "empty": (num_seqs, num_heads, 1),
        }
        shapes = {name: (torch.float32, shape) for name, shape in floats.items()}
        shapes.update({name: (torch.int64, shape) for name, shape in longs.items()})
        shapes.update({name: (torch.bool, shape) for name, shape in bools.items()})
        if dtype != torch.float32:
            shapes["raw"] = dtype, floats["kv"]
        return shapes


def _tensor(numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)
