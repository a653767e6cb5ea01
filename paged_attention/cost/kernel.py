"""The kernel as `cost.predict` sees it: the operations of one `paged_attention` call, in order.

Read a function here beside the one of its name in `checks.py` and `schedule.py`; the schedule's
run in waves is in `stream_cost.py`. As in `stage_costs.py`, `t` is the tape, `n` holds the step's
numbers, and what a function names is alive as long as there. Counts are those of a CPU; on an
accelerator the lengths, the block table and the schedule's numbers are copied between device and
host besides.
"""

from __future__ import annotations

from types import SimpleNamespace

from paged_attention.cost.kernel_waves import ID, run, workspace
from paged_attention.cost.tape import Tensor
from paged_attention.kernel.partition import ceil_div, waves, whole_blocks, work_items

PARTITION_SIZE = 1024  # tokens, where none is asked for


class Numbers:
    """The sizes of a step; those without a word are elements.

    Args: shape: cost.Shape
          wave_bytes: the device profile's
    """

    def __init__(self, shape, wave_bytes):
        self.seq_lens, self.seqs = shape.seq_lens, len(shape.seq_lens)
        self.heads, self.kv_heads = shape.num_heads, shape.num_kv_heads
        self.group = shape.num_heads // shape.num_kv_heads
        self.head_size, self.block_size = shape.head_size, shape.block_size
        self.itemsize = shape.dtype.itemsize  # of query and caches, bytes
        self.lanes, self.state = aligned(self.head_size), aligned(self.head_size + 1)
        self.rows = self.seqs * self.heads  # of the merge
        floats, kv_floats = wave_bytes // 4, self.kv_heads * self.head_size
        partition_size = shape.partition_size or min(PARTITION_SIZE, max(1, floats // kv_floats))
        wave_tokens = max(1, floats // max(kv_floats, self.heads))  # or logits, if more
        self.partition_size = whole_blocks(partition_size, self.block_size)
        items = work_items(shape.seq_lens, self.partition_size, self.block_size)
        self.waves = waves(items, wave_tokens)
        self.items = len(items)
        self.blocks = sum(item.width for item in items) // self.block_size
        self.widest = max((wave[0].width for wave in self.waves), default=0)
        self.partitions = [ceil_div(tokens, self.partition_size) for tokens in shape.seq_lens]
        self.states = self.items * self.heads
        self.apart = shape.layout == "NHD" and self.kv_heads > 1 and self.block_size > 1
        self.permuted = shape.layout == "vllm"
        self.converts = self.itemsize < 4 or self.lanes != self.head_size  # what was gathered

    @property
    def moved(self):
        """Whether the order of the merge, most partitions first, isn't the batch's."""
        return self.partitions != sorted(self.partitions, reverse=True)


def aligned(floats):
    """Rounded up to 16 bytes: where the next row of the workspace begins."""
    return whole_blocks(floats, 4)


def paged_attention(t, shape, wave_bytes):
    """A call without options, given a workspace that holds nothing yet.

    The block table is as wide as the longest sequence needs, its unused entries -1.
    """
    n = Numbers(shape, wave_bytes)
    _check_block_ids(t, n)
    schedule = _schedule(t, n)
    out = t.empty("output", n.rows * n.head_size, n.itemsize)
    run(t, n, schedule, workspace(t, n), out)
    return out


def _check_block_ids(t, n):
    columns = ceil_div(max(n.seq_lens, default=0), n.block_size)
    if not columns:
        return
    entries = n.seqs * columns
    table = Tensor(entries, 4)
    below = t.op("check", table, new=entries, itemsize=1)
    outside = t.op("check", below, t.op("check", table, new=entries, itemsize=1),
                   new=entries, itemsize=1)  # fmt: skip
    del below
    found = t.op("check", outside, new=1, itemsize=1)
    t.host_read("check", num_bytes=1)
    del found
    if entries == n.blocks:  # no unused entry
        return
    numbers = t.op("check", new=columns, itemsize=ID)
    ends = t.empty("check", n.seqs, ID)
    live = t.op("check", numbers, ends, new=entries, itemsize=1)
    del ends
    bad = t.op("check", live, outside, new=entries, itemsize=1)
    t.host_read("check", num_bytes=bad.nbytes)


def _schedule(t, n):
    """What of it outlives its making."""
    s = SimpleNamespace(inverse=None)
    if n.moved:
        order = t.empty("plan", n.seqs, ID)
        found = t.op("plan", order, new=2 * n.seqs, itemsize=ID)  # sorted values, and places
        del order, found
        s.inverse = t.empty("plan", n.seqs, ID)
    s.numbers = t.empty("plan", 6 * n.items, ID)
    num_blocks = t.empty("plan", n.items, ID)
    of_block = _repeated(t, num_blocks, s.numbers, n.blocks, 6)
    within = t.op("plan", new=n.blocks, itemsize=ID)
    first = _first_blocks(t, num_blocks)
    t.op("plan", within, _repeated(t, num_blocks, first, n.blocks, 1), into=within)
    del first
    row = of_block.view(n.blocks)
    columns = t.op("plan", row, within, new=n.blocks, itemsize=ID)
    s.blocks = t.op("plan", row, columns, new=2 * n.blocks, itemsize=ID)
    del columns
    if n.items > 1:
        s.numbers = t.op("plan", s.numbers, new=6 * n.items, itemsize=ID)
    count = max(n.widest + 1, n.block_size, n.heads)
    s.counting = t.op("plan", new=count, itemsize=ID)
    s.ones = t.op("plan", new=n.widest)
    item = s.numbers.view(n.items)
    heads = s.counting.view(n.heads)
    s.state_rows = t.op("plan", item, t.op("plan", item, heads, new=n.states, itemsize=ID),
                        new=n.states, itemsize=ID)  # fmt: skip
    return s


def _repeated(t, counts, tensor, blocks, rows):
    """tensor.repeat_interleave(counts): the places first, then what is there."""
    places = t.op("plan", counts, new=blocks, itemsize=ID)
    return t.op("plan", Tensor(rows * blocks, ID), places, new=rows * blocks, itemsize=ID)


def _first_blocks(t, num_blocks):
    """num_blocks.cumsum(0) - num_blocks"""
    ends = t.op("plan", num_blocks, new=num_blocks.numel, itemsize=ID)
    return t.op("plan", ends, num_blocks, new=num_blocks.numel, itemsize=ID)
