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
    num_heads, num_kv_heads, head_size = schedule.heads[:3]
    group = num_heads // num_kv_heads
    keys, values = (
        (rows, row_offsets(rows, schedule.kv_heads, schedule.slots, partial(views, name)))
        for rows, name in zip(caches, ("key_offsets", "value_offsets"))
    )
    query = views("query", schedule.num_seqs, num_heads, head_size)
    if schedule.static:
        views("seq_lens", schedule.num_seqs).copy_(seq_lens)
    acc_s, m = views("acc_s", schedule.num_states, head_size + 1), views("m", schedule.num_states)
    acc, s = acc_s[:, :-1], acc_s[:, -1:]
    for wave in schedule.waves:
        items = wave.num_items * num_kv_heads
        room = max(2, items)
        left = _left(schedule, wave, views)
        block_ids = _block_ids(schedule, wave, block_tables, left, views)
        wave_query = views("wave_query", wave.num_items, num_heads, head_size)
        select(query, wave.seqs, wave_query)
        states = wave_states(
            wave_query.view(items, group, head_size),
            partial(_fetch, schedule.heads, *keys, block_ids, wave, views),
            partial(_fetch, schedule.heads, *values, block_ids, wave, views),
            _dead(wave, left, views),
            wave.ones,
            WaveBuffers(
                views("logits", room, group, wave.width),
                views("wave_m", items, group, 1),
                views("wave_s", room, group, 1),
                views("wave_acc", room, group, head_size),
            ),
        )
        wave_acc, wave_s, wave_m = (x.view(len(wave.state_rows), -1) for x in states)
        acc.index_copy_(0, wave.state_rows, wave_acc)
        s.index_copy_(0, wave.state_rows, wave_s)
        m.index_copy_(0, wave.state_rows, wave_m.squeeze(1))


def _left(schedule, wave, views):
    """(work items, 1), tokens from an item's start to its sequence's end; 0 or less: none."""
    if not schedule.static:
        return wave.left
    left = views("left", wave.num_items)
    select(views("seq_lens", schedule.num_seqs), wave.seqs, left)
    return left.unsqueeze(1).sub_(wave.starts)


def _dead(wave, left, views):
    """None, or (work items, width), True for what follows a sequence's end."""
    if not wave.ragged:
        return None
    return torch.ge(wave.tokens, left, out=views("dead", wave.num_items, wave.width))


def _block_ids(schedule, wave, block_tables, left, views):
    """(work items, blocks), the table's dtype. A block past a sequence's end is never followed: an
    exact schedule has none, a static one reads block 0 in its place, and masks it."""
    shape, columns = wave.columns.shape, block_tables.shape[1]
    places = views("places", *shape)
    torch.add(wave.columns, wave.seqs.unsqueeze(1), alpha=columns, out=places)
    block_ids = views("block_ids", *shape, dtype=block_tables.dtype)
    if not schedule.static:
        return torch.take(block_tables, places, out=block_ids)
    # The table may be narrower than the longest sequence that is provided for.
    places.clamp_(max=block_tables.numel() - 1)
    torch.take(block_tables, places, out=block_ids)
    starts = wave.tokens[:: schedule.heads.block_size]
    dead = torch.ge(starts, left, out=views("dead_blocks", *shape))
    return block_ids.masked_fill_(dead, 0)


def _fetch(heads, rows, offsets, block_ids, wave, views):
    """(items, width, head_size), float32: the wave's blocks, in order."""
    _, num_kv_heads, head_size, _, dtype = heads
    rows_per_block = offsets.shape[-1]
    row_ids = views("row_ids", wave.num_items, num_kv_heads, block_ids.shape[1], rows_per_block)
    torch.add(offsets, block_ids[:, None, :, None], alpha=rows.block_step, out=row_ids)
    kv = views("kv", wave.num_items * num_kv_heads, wave.width, head_size)
    if dtype == torch.float32:
        return gather(rows, row_ids.view(-1), kv)
    # By value, while the wave is still in the cache: half-precision GEMMs are slow on most CPUs.
    return kv.copy_(gather(rows, row_ids.view(-1), views("raw", *kv.shape)))


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
