"""What all parts of one run share: the schedule, the options, and the buffers.

Each buffer is declared once, with its dtype, its largest shape and what it holds.
"""

import functools
from typing import NamedTuple

import torch

from .gemm import padded, room_for
from .options import Options
from .partition import ceil_div
from .schedule import Extent, Schedule
from .shape import StepShape
from .workspace import Buffers


class StepBuffers(Buffers):
    """Everything that one run of a schedule writes to, beside its result."""

    def __init__(self, shape: StepShape, extent: Extent) -> None:
        super().__init__()
        seqs, num_states, blocks, num_items, items, tokens, widest = extent[:7]
        shared_rows, shared_logits = extent.shared_rows, extent.shared_logits
        rows, lanes, columns = shape.num_rows, shape.lanes, shape.state_columns
        kv_heads, group = shape.num_kv_heads, shape.group
        # The rows of the matrices of a shared wave are as many as those of so many other ones.
        matrices = max(room_for(items * kv_heads), ceil_div(shared_rows, group))
        logits = max(2 * padded(widest), tokens * kv_heads, ceil_div(shared_logits, group))
        declare, float32, int64, boolean = self.declare, torch.float32, torch.int64, torch.bool
        # Phase 1
        self.query = declare(float32, seqs, rows, lanes)  # every query, scaled
        some = max(items, ceil_div(shared_rows, rows))
        self.wave_query = declare(float32, some, rows, lanes)  # those of a wave's items
        self.kv = declare(float32, tokens * kv_heads, lanes)  # a wave's K, and then its V
        self.logits = declare(float32, group * logits)  # and then the weights
        self.wave_m = declare(float32, matrices, group, 1)
        self.wave_s = declare(float32, matrices, group, 1)
        self.wave_acc = declare(float32, matrices, group, lanes)
        # Phase 2
        self.acc_s = declare(float32, num_states, columns)  # all states, in the order of the merge
        self.m = declare(float32, num_states)
        self.merge_weights = declare(float32, num_states)
        # One row more, because batched_gemm needs room for two matrices.
        self.merged_acc_s = declare(float32, seqs * rows + 1, 1, columns)
        self.merged_m = declare(float32, seqs * rows)
        unsorted = 0 if extent.is_sorted else seqs
        self.sorted_acc_s = declare(float32, unsorted, rows, columns)  # in the batch's order again
        self.sorted_m = declare(float32, unsorted, rows)
        self.no_keys = declare(boolean, seqs * rows)  # rows that see no key
        # options
        self.slopes = declare(float32, shape.num_heads)
        self.row_slopes = declare(float32, shared_rows)  # of a shared wave
        self.sinks = declare(float32, shape.num_heads)
        self.scale = declare(float32, kv_heads)  # of queries, and later v_scale
        self.factor = declare(torch.float64, kv_heads)  # scale * k_scale
        self.sink_m = declare(float32, seqs * rows)
        self.sink_weight = declare(float32, seqs * rows)
        # which rows of the caches a wave gathers
        self.table_places = declare(int64, blocks)  # in the flattened block table
        self.table_ids = declare(int64, blocks)  # block ids, viewed in the table's own dtype
        self.block_ids = declare(int64, blocks)
        self.row_ids = declare(int64, tokens * kv_heads)
        self.key_offsets = declare(int64, kv_heads * shape.block_size)
        self.value_offsets = declare(int64, kv_heads * shape.block_size)
        # which keys a query sees
        self.distance = declare(int64, tokens * shape.q_len)
        self.clamped_distance = declare(int64, tokens * shape.q_len)
        distances = max(tokens * shape.q_len, ceil_div(shared_logits, kv_heads))
        self.bias_distance = declare(float32, distances)
        self.masked = declare(boolean, tokens * shape.q_len)
        self.masked_for_all_rows = declare(boolean, tokens)
        # caches of other dtypes: what was gathered, before it is converted
        kv_elements = tokens * kv_heads * shape.head_size
        fp8 = shape.dtype.itemsize == 1
        raw_dtype = torch.uint8 if fp8 else shape.dtype
        self.raw = declare(raw_dtype, 0 if shape.needs_no_conversion else kv_elements)
        self.fp16_bits = declare(torch.int16, kv_elements if fp8 else 0)
        # a capacity plan's own
        if not extent.is_capacity:
            seqs = blocks = num_items = 0
        self.seq_lens = declare(int64, seqs)
        self.too_long = declare(boolean, seqs)
        self.tokens_to_end = declare(int64, num_items)
        self.block_starts = declare(int64, blocks)  # tokens before a block
        self.seq_ends = declare(int64, blocks)  # of each block's sequence
        self.past_end = declare(boolean, blocks)
        self.first_blocks = declare(int64, seqs)  # where each window begins
        self.columns = declare(int64, blocks)  # of the block table


# Of steps that differ by a few tokens only, most have the same buffers.
step_buffers = functools.lru_cache(maxsize=64)(StepBuffers)


class Step(NamedTuple):
    """One run of a schedule: what is to be done, how logits are made, and the memory for it."""

    schedule: Schedule
    options: Options
    buffers: StepBuffers
