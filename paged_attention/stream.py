"""Running a schedule: Phase 1 wave by wave, Phase 2 over all states, the result.

The only loops are over waves and segments; nothing is read back to the host, and every operation
writes to a buffer that is there already.
"""

import math
from functools import partial

import torch

from .layouts import gather, row_offsets, rows_of
from .phase1 import WaveBuffers, wave_states
from .phase2 import LOWEST, merge_rows


@torch.no_grad()
def run(schedule, options, inputs, layout, memory, out, lse):
    """One decode step.

    Args:    inputs: query, key_cache, value_cache, block_tables, seq_lens, checked; seq_lens is
                   read by a static schedule only
             memory: a buffer of schedule.buffers.nbytes at least, whatever it holds
             out: query's shape;  lse: out.shape[:-1], float32, or None
    """
    query, key_cache, value_cache, block_tables, seq_lens = inputs
    views = schedule.buffers.views(memory)
    _scaled_query(query, options, views["query"])
    if schedule.waves and key_cache.numel() and block_tables.numel():
        caches = rows_of(key_cache, value_cache, layout)
        _phase1(schedule, caches, block_tables, seq_lens, views)
        _phase2(schedule, views)
    else:  # no tokens, or no memory that could hold any
        views["merged_acc_s"].zero_()
        views["merged_m"].fill_(LOWEST)
    acc_s, m = _in_order(schedule, views)
    _write_result(acc_s, m, options.v_scale, views["empty"], out, lse)


def _write_result(acc_s, m, v_scale, empty, out, lse):
    """out = acc / s * v_scale and lse = m + ln s, or (0, -inf) where no key was seen."""
    acc, s = acc_s[..., :-1], acc_s[..., -1:]
    if lse is not None:
        torch.log(s, out=lse.view(s.shape)).add_(m.unsqueeze(-1))
    torch.eq(s, 0, out=empty)
    acc.div_(s.clamp_(min=1.0))  # an s that isn't 0 is 1 or more: its largest term is exp(0)
    _multiply(acc, v_scale)
    out.copy_(acc.masked_fill_(empty, 0.0).view(out.shape))


def _scaled_query(query, options, out):
    """(num_seqs, num_heads, head_size), float32: the scale of the logits, and of the keys."""
    out.view(query.shape).copy_(query)
    out.mul_(options.scale)
    _multiply(out, options.k_scale)


def _multiply(heads, scale):
    """heads *= scale, a number or one for each KV head; heads: (num_seqs, num_heads, ...)"""
    if not isinstance(scale, float):
        heads.unflatten(1, (scale.numel(), -1)).mul_(scale)
    elif scale != 1.0:
        heads.mul_(scale)


def _phase1(schedule, caches, block_tables, seq_lens, views):
    """The states of all work items, into views["acc_s"] and views["m"]."""
    heads = schedule.heads
    keys, values = caches
    tokens = schedule.tokens[: heads.block_size]
    key_offsets = row_offsets(keys, schedule.kv_heads, tokens, views["key_offsets"])
    value_offsets = row_offsets(values, schedule.kv_heads, tokens, views["value_offsets"])
    # Where in the flattened table each work item's blocks begin.
    num_columns = block_tables.shape[1]
    first = torch.add(schedule.columns, schedule.seqs, alpha=num_columns, out=views["first"])
    left = schedule.left
    if schedule.static:
        lens = views["seq_lens"].copy_(seq_lens)
        left = torch.index_select(lens, 0, schedule.seqs, out=views["left"])
        left.sub_(schedule.starts)

    acc_s, m = views["acc_s"], views["m"]
    for wave in schedule.waves:
        ids = _block_ids(schedule, wave, block_tables, first, left, views)
        dead = None
        if wave.ragged:
            dead = views["dead"][: ids.shape[0] * wave.width].view(-1, wave.width)
            torch.ge(schedule.tokens[: wave.width], left[wave.items].unsqueeze(1), out=dead)
        states = wave_states(
            *_buffers(schedule, wave, views),
            partial(_fetch, keys, key_offsets, ids, wave, views),
            partial(_fetch, values, value_offsets, ids, wave, views),
            dead,
            schedule.ones[: wave.width],
        )
        wave_acc, wave_s, wave_m = (x.view(len(wave.state_rows), -1) for x in states)
        acc_s[:, :-1].index_copy_(0, wave.state_rows, wave_acc)
        acc_s[:, -1:].index_copy_(0, wave.state_rows, wave_s)
        m.index_copy_(0, wave.state_rows, wave_m.view(-1))


def _block_ids(schedule, wave, block_tables, first, left, views):
    """(items, blocks), the table's dtype. A block past a sequence's end is never followed: an
    exact schedule has none, a static one reads block 0 in its place, and masks it."""
    block_size = schedule.heads.block_size
    num_items, num_blocks = len(wave.seqs), wave.width // block_size
    places = views["places"][: num_items * num_blocks].view(num_items, num_blocks)
    torch.add(first[wave.items].unsqueeze(1), schedule.tokens[:num_blocks], out=places)
    ids = views["block_ids"].view(block_tables.dtype)[: places.numel()].view(places.shape)
    if not schedule.static:
        return torch.take(block_tables, places, out=ids)
    # The table may be narrower than the longest sequence that is provided for.
    torch.take(block_tables, places.clamp_(max=block_tables.numel() - 1), out=ids)
    dead = views["dead_blocks"][: places.numel()].view(places.shape)
    starts = schedule.tokens[: wave.width : block_size]
    return ids.masked_fill_(torch.ge(starts, left[wave.items].unsqueeze(1), out=dead), 0)


def _buffers(schedule, wave, views):
    """The wave's queries, scaled, and where its intermediates go."""
    num_heads, num_kv_heads, head_size, _, _ = schedule.heads
    num_items, group = len(wave.seqs), num_heads // num_kv_heads
    query = views["wave_query"][:num_items]
    torch.index_select(views["query"], 0, wave.seqs, out=query)
    items = num_items * num_kv_heads
    room = max(2, items)
    logits = views["logits"][: room * group * wave.width].view(room, group, wave.width)
    buffers = WaveBuffers(logits, views["wave_m"][:items], views["wave_s"], views["wave_acc"])
    return query.view(items, group, head_size), buffers


def _fetch(rows, offsets, block_ids, wave, views):
    """(items * num_kv_heads, width, head_size), float32: the wave's blocks, in order."""
    num_items, num_blocks = block_ids.shape
    num_kv_heads, head_size = len(offsets), views["query"].shape[-1]
    shape = num_items, num_kv_heads, num_blocks, offsets.shape[-1]
    ids = views["row_ids"][: math.prod(shape)].view(shape)
    torch.add(offsets, block_ids[:, None, :, None], alpha=rows.block_step, out=ids)
    kv = views["kv"][: num_items * num_kv_heads * wave.width * head_size]
    if "raw" in views:  # the caches' dtype isn't float32: by value, while the wave is in the cache
        kv.copy_(gather(rows, ids.view(-1), views["raw"][: kv.numel()]))
    else:
        gather(rows, ids.view(-1), kv)
    return kv.view(-1, wave.width, head_size)


def _phase2(schedule, views):
    """One merge for each query head of each sequence, into views["merged_acc_s"] and ["merged_m"],
    in the order of the segments."""
    merged_acc_s, merged_m = views["merged_acc_s"], views["merged_m"]
    for row, num_rows, state, num_states in schedule.segments:
        out_acc_s, out_m = merged_acc_s[row:], merged_m[row : row + num_rows]
        if num_states == 0:  # empty sequences
            out_acc_s.zero_()
            out_m.fill_(LOWEST)
            continue
        states = slice(state, state + num_rows * num_states)
        merge_rows(
            views["acc_s"][states].view(num_rows, num_states, -1),
            views["m"][states].view(num_rows, num_states),
            out_acc_s,
            out_m,
        )


def _in_order(schedule, views):
    """What Phase 2 gave, in the batch's order: (num_seqs, num_heads, head_size + 1) and m."""
    num_seqs, num_heads, head_size = views["query"].shape
    acc_s = views["merged_acc_s"][:-1].view(num_seqs, num_heads, head_size + 1)
    m = views["merged_m"].view(num_seqs, num_heads)
    if schedule.inverse is None:
        return acc_s, m
    return (
        torch.index_select(acc_s, 0, schedule.inverse, out=views["sorted_acc_s"].view_as(acc_s)),
        torch.index_select(m, 0, schedule.inverse, out=views["sorted_m"].view_as(m)),
    )
