"""Running a schedule: Phase 1 wave by wave, Phase 2 over all states, the result.

The only loops are over waves and segments. Nothing is read back to the host, and every operation
writes to a buffer that is there already.
"""

from functools import partial

import torch

from .fp8 import meaning_of, widen
from .layouts import gather, row_offsets, rows_of, select
from .mask import wave_mask
from .phase1 import wave_states
from .phase2 import LOWEST, aligned, finish, merge_rows, merge_sink


@torch.no_grad()
def run(schedule, options, inputs, layout, kv_cache_dtype, views, out, lse):
    """One decode step.

    Args:    inputs: query, key_cache, value_cache, block_tables, seq_lens, checked; seq_lens is
                   read by a static schedule only
             views: of the schedule's buffers, whatever they hold
             out: query's shape;  lse: out.shape[:-1], float32, or None
    """
    query, key_cache, value_cache, block_tables, seq_lens = inputs
    _scaled_query(schedule.heads, query, options, views)
    lens = too_long = None
    if schedule.static:
        lens = views("seq_lens", schedule.num_seqs).copy_(seq_lens)
        covered = block_tables.shape[1] * schedule.heads.block_size if key_cache.numel() else 0
        most = min(schedule.longest, covered)
        too_long = torch.gt(lens, most, out=views("too_long", schedule.num_seqs))
    if schedule.waves and key_cache.numel() and block_tables.numel():
        meaning = meaning_of(key_cache.dtype, kv_cache_dtype)
        if meaning.itemsize == 1:  # bytes are moved as bytes
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        caches = rows_of(key_cache, value_cache, layout)
        _phase1(schedule, options, caches, meaning, block_tables, lens, views)
    else:  # no tokens, or no memory that could hold any: states of nothing
        acc_s, m = all_states(schedule, views)
        acc_s.zero_()
        m.fill_(LOWEST)
    acc_s, m = _phase2(schedule, views)
    _write_result(schedule.heads, options, acc_s, m, too_long, views, out, lse)


def all_states(schedule, views):
    """acc_s: (all states, aligned(head_size + 1)) and m: (all states,)"""
    num_states, columns = schedule.num_states, aligned(schedule.heads.head_size + 1)
    return views("acc_s", num_states, columns), views("m", num_states)


def _scaled_query(heads, query, options, views):
    """The queries in float32, a sequence's rows in the order (query head, query token), times the
    scale of the logits, and of the keys."""
    scaled = views("query", len(query), heads.num_heads, heads.q_len, heads.lanes)
    scaled = scaled[..., : heads.head_size]
    scale, k_scale = options.scale, options.k_scale
    if not isinstance(k_scale, torch.Tensor):  # as one number: each alone may be out of range
        scale, k_scale = scale * k_scale, 1.0
    scaled.copy_(_by_head(query, 3)).mul_(scale)
    _multiply(heads, scaled, k_scale, views)


def _by_head(tensor, rank):
    """(num_seqs, num_heads, q_len, ...), a view of a query, an output, or (rank 2) an lse."""
    return (tensor.unsqueeze(1) if tensor.dim() == rank else tensor).transpose(1, 2)


def _multiply(heads, rows, scale, views):
    """rows *= scale, a number or one for each KV head.

    Args:    rows: (num_seqs, num_heads, q_len, head_size)
    """
    if isinstance(scale, torch.Tensor):
        scale = views("scale", heads.num_kv_heads).copy_(scale).view(-1, 1, 1, 1)
        rows.unflatten(1, (heads.num_kv_heads, -1)).mul_(scale)
    elif scale != 1.0:
        rows.mul_(scale)


def _phase1(schedule, options, caches, meaning, block_tables, lens, views):
    """The states of all work items, into the buffers acc_s and m."""
    heads, head_size = schedule.heads, schedule.heads.head_size
    keys, values = (
        (rows, row_offsets(rows, schedule.kv_heads, schedule.slots, partial(views, name)))
        for rows, name in zip(caches, ("key_offsets", "value_offsets"))
    )
    query = views("query", schedule.num_seqs, heads.num_rows, heads.lanes)
    acc_s, m = all_states(schedule, views)
    acc, s = acc_s[:, :head_size], acc_s[:, head_size : head_size + 1]
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = views("slopes", len(slopes)).copy_(slopes).view(-1, 1, 1)
    if schedule.static:
        block_ids, left = _follow(schedule, block_tables, lens, views)
    else:
        columns, left = schedule.block_columns, schedule.left
        block_ids = _block_ids(schedule, block_tables, columns, views)
    for wave in schedule.waves:
        items = wave.num_items * heads.num_kv_heads
        wave_query = views("wave_query", wave.num_items, heads.num_rows, heads.lanes)
        select(query, wave.seqs, wave_query)
        ids = block_ids[wave.blocks].view(wave.num_items, 1, -1, 1)
        wave_acc, wave_s, wave_m = wave_states(
            wave_query.view(items, -1, heads.lanes)[..., :head_size],
            partial(_fetch, heads, *keys, ids, meaning, views),
            partial(_fetch, heads, *values, ids, meaning, views),
            wave_mask(schedule, wave, options, left, views),
            options.softcap,
            slopes,
            schedule.ones[: wave.width],
            views,
        )
        acc.index_copy_(0, wave.state_rows, wave_acc.view(-1, heads.lanes)[:, :head_size])
        s.index_copy_(0, wave.state_rows, wave_s.view(-1, 1))
        m.index_copy_(0, wave.state_rows, wave_m.view(-1))


def _block_ids(schedule, block_tables, columns, views):
    """(blocks,), int64: the ids of all blocks, in the order of the waves.

    Args:    columns: (blocks,), int64, of each block, within the table
    """
    num_blocks = len(schedule.block_seqs)
    places = views("places", num_blocks)  # in the flattened table
    torch.add(columns, schedule.block_seqs, alpha=block_tables.shape[1], out=places)
    ids = views("table_ids", num_blocks, dtype=block_tables.dtype)
    torch.take(block_tables, places, out=ids)
    return views("block_ids", num_blocks).copy_(ids)


def _follow(schedule, block_tables, lens, views):
    """For a static schedule, whose lengths are on the device: a block past a sequence's end is
    never followed, block 0 is read in its place, and what was read is masked.

    Args:    lens: (num_seqs,), int64, overwritten
    Returns: block_ids: (blocks,);  left: (work items,), tokens from an item's start to its
                 sequence's end
    """
    heads, num_blocks = schedule.heads, len(schedule.block_seqs)
    block_size, last_column = heads.block_size, block_tables.shape[1] - 1
    columns, starts = schedule.block_columns, views("places", num_blocks)
    if heads.window is not None:  # columns are counted from the first block in sight
        first = torch.sub(
            lens, heads.window + heads.q_len - 1, out=views("first_blocks", len(lens))
        )
        first.clamp_(min=0).div_(block_size, rounding_mode="floor")
        lens.sub_(first, alpha=block_size)
        columns = select(first, schedule.block_seqs, views("columns", num_blocks)).add_(columns)
    columns = torch.clamp(columns, max=last_column, out=views("columns", num_blocks))
    block_ids = _block_ids(schedule, block_tables, columns, views)
    torch.mul(schedule.block_columns, block_size, out=starts)
    ends = select(lens, schedule.block_seqs, views("table_ids", num_blocks))
    block_ids.masked_fill_(torch.ge(starts, ends, out=views("dead_blocks", num_blocks)), 0)
    left = select(lens, schedule.seqs, views("left", len(schedule.seqs))).sub_(schedule.starts)
    return block_ids, left


def _fetch(heads, rows, offsets, block_ids, meaning, views):
    """(items, width, lanes), float32: the wave's blocks, in order, read as dtype meaning."""
    num_items, _, num_blocks, _ = block_ids.shape
    row_ids = views("row_ids", num_items, heads.num_kv_heads, num_blocks, offsets.shape[2])
    torch.add(offsets, block_ids, alpha=rows.block_step, out=row_ids)
    shape = num_items * heads.num_kv_heads, num_blocks * heads.block_size
    kv = views("kv", *shape, heads.lanes)
    if heads.as_stored:
        return gather(rows, row_ids.view(-1), kv)
    # By value, while the wave is still in the cache: half-precision GEMMs are slow on most CPUs.
    raw = gather(rows, row_ids.view(-1), views("raw", *shape, heads.head_size))
    out = kv[..., : heads.head_size]
    if heads.dtype.itemsize > 1:
        out.copy_(raw)
    else:
        widen(raw, meaning, views("half", *raw.shape), out)
    return kv


def _phase2(schedule, views):
    """One merge for each row of each sequence.

    Returns: acc_s: (num_seqs, num_rows, aligned(head_size + 1)) and m: (num_seqs, num_rows),
                 in order
    """
    num_seq_rows = schedule.heads.num_rows
    acc_s, m = all_states(schedule, views)
    columns = acc_s.shape[1]
    weights = views("weights", schedule.num_states)
    rows = schedule.num_seqs * num_seq_rows
    merged_acc_s = views("merged_acc_s", rows + 1, 1, columns)  # one more than there are:
    merged_m = views("merged_m", rows)  # batched_gemm wants room for two
    for row, num_rows, state, num_states in schedule.segments:
        out_acc_s, out_m = merged_acc_s[row:], merged_m[row : row + num_rows]
        if num_states == 0:  # empty sequences
            out_acc_s.zero_()
            out_m.fill_(LOWEST)
            continue
        states = slice(state, state + num_rows * num_states)
        merge_rows(
            acc_s[states].view(num_rows, num_states, columns),
            m[states].view(num_rows, num_states),
            weights[states].view(num_rows, num_states),
            out_acc_s,
            out_m,
        )
    acc_s = merged_acc_s[:-1].view(schedule.num_seqs, num_seq_rows, columns)
    m = merged_m.view(schedule.num_seqs, num_seq_rows)
    if schedule.inverse is None:
        return acc_s, m
    return (
        select(acc_s, schedule.inverse, views("sorted_acc_s", *acc_s.shape)),
        select(m, schedule.inverse, views("sorted_m", *m.shape)),
    )


def _write_result(heads, options, acc_s, m, too_long, views, out, lse):
    """out = acc / s * v_scale and lse = m + ln s, or (0, -inf) where no key was seen, or NaN where
    a sequence is too_long for its plan or its table: a part of it would pass for all of it."""
    shape = len(m), heads.num_heads, heads.q_len
    acc_s, m = acc_s.view(*shape, acc_s.shape[-1]), m.view(shape)
    acc, s = acc_s[..., : heads.head_size], acc_s[..., heads.head_size]
    if options.sinks is not None:
        sinks = views("sinks", heads.num_heads).copy_(options.sinks).unsqueeze(1)
        m = merge_sink(acc, s, m, sinks, views("sink_m", *shape), views("sink_s", *shape))
    empty = torch.eq(s, 0, out=views("empty", *shape)).unsqueeze(-1)
    result = finish(acc, s, m, None if lse is None else _by_head(lse, 2))
    _multiply(heads, result, options.v_scale, views)
    result.masked_fill_(empty, 0.0)  # a scale times 0 may be NaN
    if too_long is not None:
        result.masked_fill_(too_long.view(-1, 1, 1, 1), torch.nan)
        if lse is not None:
            lse.masked_fill_(too_long.view(-1, *[1] * (lse.dim() - 1)), torch.nan)
    _by_head(out, 3).copy_(result)
