"""What all parts of one run share: the schedule, the options, and the buffers.

Each buffer is declared once, with its dtype, its largest shape and what it holds.
"""

from typing import NamedTuple

import torch

from .gemm import room_for
from .options import Options
from .schedule import Schedule
from .workspace import Buffers


class StepBuffers(Buffers):
    """Everything that one run of a schedule writes to, beside its result."""

    def __init__(self, schedule: Schedule) -> None:
        shape, seqs, num_states = schedule.shape, schedule.num_seqs, schedule.num_states
        rows, lanes, columns = shape.num_rows, shape.lanes, shape.state_columns
        kv_heads, group = shape.num_kv_heads, shape.group
        items = max((wave.num_items for wave in schedule.waves), default=0)  # of a wave
        tokens = max((wave.num_items * wave.width for wave in schedule.waves), default=0)
        matrices = room_for(items * kv_heads)
        int64, boolean = torch.int64, torch.bool

        def floats(*shape: int):
            return self.declare(torch.float32, *shape)

        # Phase 1
        self.query = floats(seqs, rows, lanes)  # every query, scaled
        self.wave_query = floats(items, rows, lanes)  # those of a wave's items
        self.kv = floats(tokens * kv_heads, lanes)  # a wave's K, and then its V
        self.logits = floats(group * max(2 * schedule.widest, tokens * kv_heads))  # then weights
        self.wave_m = floats(matrices, group, 1)
        self.wave_s = floats(matrices, group, 1)
        self.wave_acc = floats(matrices, group, lanes)
        # Phase 2
        self.acc_s = floats(num_states, columns)  # all states, in the order of the merge
        self.m = floats(num_states)
        self.merge_weights = floats(num_states)
        self.merged_acc_s = floats(seqs * rows + 1, 1, columns)  # one more, as batched_gemm wants
        self.merged_m = floats(seqs * rows)
        unsorted = 0 if schedule.inverse is None else seqs
        self.sorted_acc_s = floats(unsorted, rows, columns)  # in the batch's order again
        self.sorted_m = floats(unsorted, rows)
        self.no_keys = self.declare(boolean, seqs * rows)  # rows that see no key
        # options
        self.slopes = floats(shape.num_heads)
        self.sinks = floats(shape.num_heads)
        self.scale = floats(kv_heads)  # k_scale, and later v_scale
        self.sink_m = floats(seqs * rows)
        self.sink_weight = floats(seqs * rows)
        # which rows of the caches a wave gathers
        blocks = len(schedule.block_seqs)
        self.table_places = self.declare(int64, blocks)  # in the flattened block table
        self.table_ids = self.declare(int64, blocks)  # block ids in the table's own dtype
        self.block_ids = self.declare(int64, blocks)
        self.row_ids = self.declare(int64, tokens * kv_heads)
        self.key_offsets = self.declare(int64, kv_heads * shape.block_size)
        self.value_offsets = self.declare(int64, kv_heads * shape.block_size)
        # which keys a query sees
        self.distance = self.declare(int64, tokens * shape.q_len)
        self.clamped_distance = self.declare(int64, tokens * shape.q_len)
        self.bias_distance = floats(tokens * shape.q_len)
        self.masked = self.declare(boolean, tokens * shape.q_len)
        self.masked_for_all_rows = self.declare(boolean, tokens)
        # caches of other dtypes: what was gathered, before it is converted
        kv_elements = tokens * kv_heads * shape.head_size
        fp8 = shape.dtype.itemsize == 1
        raw_dtype = torch.uint8 if fp8 else shape.dtype
        self.raw = self.declare(raw_dtype, 0 if shape.needs_no_conversion else kv_elements)
        self.fp16_bits = self.declare(torch.int16, kv_elements if fp8 else 0)
        # a capacity plan's own
        if not schedule.is_capacity:
            seqs = blocks = 0
        self.seq_lens = self.declare(int64, seqs)
        self.too_long = self.declare(boolean, seqs)
        self.tokens_to_end = self.declare(int64, len(schedule.items.seqs) if seqs else 0)
        self.block_starts = self.declare(int64, blocks)  # tokens before a block
        self.seq_ends = self.declare(int64, blocks)  # of each block's sequence
        self.past_end = self.declare(boolean, blocks)
        self.first_blocks = self.declare(int64, seqs)  # where each window begins
        self.columns = self.declare(int64, blocks)  # of the block table


class Step(NamedTuple):
    """One run of a schedule: what is to be done, how logits are made, and the memory for it."""

    schedule: Schedule
    options: Options
    buffers: StepBuffers
