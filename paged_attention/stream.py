"""Running a schedule: Phase 1 wave by wave, Phase 2 over all states, the result.

The only loops are over waves and segments. Nothing is read back to the host, and every operation
writes to a buffer that is there already.
"""

from functools import partial

import torch

from .layouts import gather, row_offsets, rows_of, select
from .phase1 import WaveBuffers, wave_states
from .phase2 import LOWEST, finish, merge_rows


@torch.no_grad()
def run(schedule, options, inputs, layout, views, out, lse):
    """One decode step.

    Args:    inputs: query, key_cache, value_cache, block_tables, seq_lens, checked; seq_lens is
                   read by a static schedule only
             views: of the schedule's buffers, whatever they hold
             out: query's shape;  lse: out.shape[:-1], float32, or None
    """
    query, key_cache, value_cache, block_tables, seq_lens = inputs
    _scaled_query(query, options, views("query", *query.shape))
    if schedule.waves and key_cache.numel() and block_tables.numel():
        caches = rows_of(key_cache, value_cache, layout)
        _phase1(schedule, caches, block_tables, seq_lens, views)
    else:  # no tokens, or no memory that could hold any: states of nothing
        views("acc_s", schedule.num_states, schedule.heads.head_size + 1).zero_()
        views("m", schedule.num_states).fill_(LOWEST)
    acc_s, m = _phase2(schedule, views)
    _write_result(acc_s, m, options.v_scale, views, out, lse)


def _scaled_query(query, options, out):
    """The queries in float32, times the scale of the logits, and of the keys."""
    _multiply(out.copy_(query).mul_(options.scale), options.k_scale)


def _multiply(heads, scale):
    """heads *= scale, a number or one for each KV head; heads: (..., num_heads, head_size)"""
    if isinstance(scale, torch.Tensor):
        heads.unflatten(-2, (scale.numel(), -1)).mul_(scale)
    elif scale != 1.0:
        heads.mul_(scale)


def _phase1(schedule, caches, block_tables, seq_lens, views):
    """The states of all work items, into the buffers acc_s and m."""
    num_heads, _, head_size, block_size, _ = schedule.heads
    keys, values = (
        (rows, row_offsets(rows, schedule.kv_heads, schedule.slots, partial(views, name)))
        for rows, name in zip(caches, ("key_offsets", "value_offsets"))
    )
    query = views("query", schedule.num_seqs, num_heads, head_size)
    acc_s, m = views("acc_s", schedule.num_states, head_size + 1), views("m", schedule.num_states)
    acc, s = acc_s[:, :-1], acc_s[:, -1:]
    left, block_ids = schedule.left, _block_ids(schedule, block_tables, views)
    if schedule.static:
        left = _mask_what_is_dead(schedule, block_tables, seq_lens, block_ids, query, views)
    for wave in schedule.waves:
        buffers = _wave_buffers(schedule, wave, views)
        select(query, wave.seqs, buffers.seq_query)
        dead = None
        if wave.ragged:
            # An exact schedule's items end within their last block; a static one's anywhere.
            slots = schedule.counting[: wave.width]
            slots = slots if schedule.static else slots[-block_size:]
            dead = views("dead", wave.num_items, len(slots))
            torch.ge(slots, left[wave.items].unsqueeze(1), out=dead)
        ids = block_ids[wave.blocks].view(wave.num_items, 1, -1, 1)
        wave_acc, wave_s, wave_m = wave_states(
            partial(_fetch, *keys, ids, buffers, views),
            partial(_fetch, *values, ids, buffers, views),
            dead,
            schedule.ones[: wave.width],
            buffers,
        )
        acc.index_copy_(0, wave.state_rows, wave_acc.view(-1, head_size))
        s.index_copy_(0, wave.state_rows, wave_s.view(-1, 1))
        m.index_copy_(0, wave.state_rows, wave_m.view(-1))


def _block_ids(schedule, block_tables, views):
    """(blocks,), int64: the ids of all blocks, in the order of the waves."""
    num_blocks = len(schedule.block_seqs)
    places = views("places", num_blocks)  # in the flattened table
    columns = block_tables.shape[1]
    in_row = schedule.block_columns
    if schedule.static:  # the table may be narrower than the capacity
        in_row = torch.clamp(in_row, max=columns - 1, out=places)
    torch.add(in_row, schedule.block_seqs, alpha=columns, out=places)
    ids = views("table_ids", num_blocks, dtype=block_tables.dtype)
    torch.take(block_tables, places, out=ids)
    return views("block_ids", num_blocks).copy_(ids)


def _mask_what_is_dead(schedule, block_tables, seq_lens, block_ids, query, views):
    """For a static schedule, whose lengths are on the device: a block past a sequence's end is
    never followed, block 0 is read in its place, and what was read is masked. A sequence longer
    than was planned, or than its row covers, becomes NaN: a part of it would pass for all of it.

    Returns: left: (work items,), tokens from an item's start to its sequence's end
    """
    num_blocks, num_items = len(block_ids), len(schedule.seqs)
    lens = views("seq_lens", schedule.num_seqs).copy_(seq_lens)
    block_size = schedule.heads.block_size
    most = min(schedule.longest, block_tables.shape[1] * block_size)
    too_long = torch.gt(lens, most, out=views("too_long", len(lens)))
    query.masked_fill_(too_long[:, None, None], torch.nan)
    starts = torch.mul(schedule.block_columns, block_size, out=views("places", num_blocks))
    block_lens = select(lens, schedule.block_seqs, views("table_ids", num_blocks))
    block_ids.masked_fill_(torch.ge(starts, block_lens, out=views("dead_blocks", num_blocks)), 0)
    return select(lens, schedule.seqs, views("left", num_items)).sub_(schedule.starts)


def _wave_buffers(schedule, wave, views):
    """Where the intermediates of a wave of this size go."""
    key = wave.num_items, wave.width
    if key not in views.once:
        num_heads, num_kv_heads, head_size, block_size, dtype = schedule.heads
        items, group = wave.num_items * num_kv_heads, num_heads // num_kv_heads
        room = max(2, items)  # batched_gemm wants room for two
        kv = views("kv", items, wave.width, head_size)
        seq_query = views("wave_query", wave.num_items, num_heads, head_size)
        views.once[key] = WaveBuffers(
            seq_query=seq_query,
            query=seq_query.view(items, group, head_size),
            raw=None if dtype == torch.float32 else views("raw", *kv.shape),
            kv=kv,
            logits=views("logits", room, group, wave.width),
            m=views("wave_m", items, group, 1),
            s=views("wave_s", room, group, 1),
            acc=views("wave_acc", room, group, head_size),
        )
    return views.once[key]


def _fetch(rows, offsets, block_ids, buffers, views):
    """(items, width, head_size), float32: the wave's blocks, in order."""
    num_items, _, num_blocks, _ = block_ids.shape
    num_kv_heads, _, rows_per_block = offsets.shape
    row_ids = views("row_ids", num_items, num_kv_heads, num_blocks, rows_per_block)
    torch.add(offsets, block_ids, alpha=rows.block_step, out=row_ids)
    if buffers.raw is None:
        return gather(rows, row_ids.view(-1), buffers.kv)
    # By value, while the wave is still in the cache: half-precision GEMMs are slow on most CPUs.
    return buffers.kv.copy_(gather(rows, row_ids.view(-1), buffers.raw))


def _phase2(schedule, views):
    """One merge for each query head of each sequence.

    Returns: acc_s: (num_seqs, num_heads, head_size + 1) and m: (num_seqs, num_heads), in order
    """
    num_heads, _, head_size = schedule.heads[:3]
    acc_s, m = views("acc_s", schedule.num_states, head_size + 1), views("m", schedule.num_states)
    rows = schedule.num_seqs * num_heads
    merged_acc_s = views("merged_acc_s", rows + 1, 1, head_size + 1)  # one more than there are:
    merged_m = views("merged_m", rows)  # batched_gemm wants room for two
    for row, num_rows, state, num_states in schedule.segments:
        out_acc_s, out_m = merged_acc_s[row:], merged_m[row : row + num_rows]
        if num_states == 0:  # empty sequences
            out_acc_s.zero_()
            out_m.fill_(LOWEST)
            continue
        states = slice(state, state + num_rows * num_states)
        merge_rows(
            acc_s[states].view(num_rows, num_states, head_size + 1),
            m[states].view(num_rows, num_states),
            out_acc_s,
            out_m,
        )
    acc_s = merged_acc_s[:-1].view(schedule.num_seqs, num_heads, head_size + 1)
    m = merged_m.view(schedule.num_seqs, num_heads)
    if schedule.inverse is None:
        return acc_s, m
    return (
        select(acc_s, schedule.inverse, views("sorted_acc_s", *acc_s.shape)),
        select(m, schedule.inverse, views("sorted_m", *m.shape)),
    )


def _write_result(acc_s, m, v_scale, views, out, lse):
    """out = acc / s * v_scale and lse = m + ln s, or (0, -inf) where no key was seen."""
    empty = torch.eq(acc_s[..., -1:], 0, out=views("empty", *m.shape, 1))
    result = finish(acc_s, m, lse)
    _multiply(result, v_scale)
    out.copy_(result.masked_fill_(empty, 0.0).view(out.shape))  # a scale times 0 may be NaN
