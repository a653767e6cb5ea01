"""Phase 1: partitions -> states, a wave of them at a time, in memory that is used again."""

from functools import partial

import torch

from paged_attention.kernel.gather import fetch, row_offsets, select
from paged_attention.kernel.mask import adjust, wave_mask
from paged_attention.kernel.merge import LOWEST, batched_gemm
from paged_attention.kernel.states import all_states


def phase1(schedule, options, caches, meaning, block_tables, lens, views):
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
        block_ids, left = _capacity_block_ids(schedule, block_tables, lens, views)
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
            partial(fetch, heads, *keys, ids, meaning, views),
            partial(fetch, heads, *values, ids, meaning, views),
            wave_mask(schedule, wave, options, left, views),
            options.softcap,
            slopes,
            schedule.ones[: wave.width],
            views,
        )
        acc.index_copy_(0, wave.state_rows, wave_acc.view(-1, heads.lanes)[:, :head_size])
        s.index_copy_(0, wave.state_rows, wave_s.view(-1, 1))
        m.index_copy_(0, wave.state_rows, wave_m.view(-1))


def wave_states(query, key, value, mask, softcap, slopes, ones, views):
    """Reduce equally wide partitions, each on its own.

    An item is a pair of work item and KV head, in this order: one matrix of a batched GEMM. Its
    rows are the query heads that share the KV head, and of each of them the query tokens, so K and
    V are used as they were gathered, never expanded.

    Args:    query: (items, rows, head_size), float32, already scaled
             key, value: functions that gather (items, width, aligned(head_size)), float32; value
                   is called when key's result is no longer needed, so both may use the same memory
             mask: what the rows see: what a slot holds that none sees, NaN included, is no matter
             softcap, slopes: as mask.adjust
             ones: (width, 1)
             views: of the schedule's buffers
    Returns: acc, s and m, (items, rows, aligned(head_size) or 1)
    """
    items, rows, head_size = query.shape
    room, width = max(2, items), ones.shape[0]  # batched_gemm wants room for two
    k = key()[..., :head_size]  # (items, width, head_size)
    # Each (items, rows, width):
    logits = batched_gemm(query, k.transpose(1, 2), views("logits", room, rows, width))
    adjust(logits, mask, softcap, slopes)
    # No larger than LOWEST where all logits are -inf: their exp is 0 then, not NaN.
    m = torch.amax(logits, -1, keepdim=True, out=views("wave_m", items, rows, 1))
    weights = logits.sub_(m.clamp_(min=LOWEST)).exp_()
    s = batched_gemm(weights, ones.expand(items, -1, -1), views("wave_s", room, rows, 1))
    v = value()  # (items, width, aligned(head_size))
    if mask.dead is not None:
        # 0 times NaN is NaN. A CPU masks element by element: the fewer, the faster.
        wide = v.view(torch.complex128) if v.is_cpu else v
        last = wide.unflatten(0, (len(mask.dead), -1))[:, :, -mask.dead.shape[1] :]
        last.masked_fill_(mask.dead[:, None, :, None], 0.0)
    acc = batched_gemm(weights, v, views("wave_acc", room, rows, v.shape[2]))
    return acc, s, m


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


def _capacity_block_ids(schedule, block_tables, lens, views):
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
