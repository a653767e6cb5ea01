"""The run of the kernel's schedule as `cost.predict` sees it: read it beside `stream.py`.

A wave's operations are `_phase1` and the functions of `phase1.py` that it calls; `w` holds the
workspace's buffers, under the schedule's names for them.
"""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

from paged_attention.cost.tape import Tensor
from paged_attention.kernel.partition import whole_blocks

ID = 8  # bytes of an int64; block tables hold int32
ALIGNMENT = 64  # bytes, of a buffer


def workspace(t, n):
    """The buffers that a run writes to, one after the other in one piece of memory."""
    items = max((len(wave) for wave in n.waves), default=0)
    tokens = max((len(wave) * wave[0].width for wave in n.waves), default=0)
    matrices = max(2, items * n.kv_heads)
    moved = n.rows if n.moved else 0
    sizes = {
        "query": (n.rows * n.lanes, 4),
        "wave_query": (items * n.heads * n.lanes, 4),
        "raw": (tokens * n.kv_heads * n.head_size if n.converts else 0, n.itemsize),
        "kv": (tokens * n.kv_heads * n.lanes, 4),
        "logits": (n.group * max(2 * n.widest, tokens * n.kv_heads), 4),
        "wave_m": (matrices * n.group, 4),
        "wave_s": (matrices * n.group, 4),
        "wave_acc": (matrices * n.group * n.lanes, 4),
        "acc_s": (n.states * n.state, 4),
        "m": (n.states, 4),
        "weights": (n.states, 4),
        "merged_acc_s": ((n.rows + 1) * n.state, 4),
        "merged_m": (n.rows, 4),
        "sorted_acc_s": (moved * n.state, 4),
        "sorted_m": (moved, 4),
        "empty": (n.rows, 1),
        "places": (n.blocks, ID),
        "table_ids": (n.blocks, ID),
        "block_ids": (n.blocks, ID),
        "row_ids": (tokens * n.kv_heads, ID),
        "key_offsets": (n.kv_heads * n.block_size, ID),
        "value_offsets": (n.kv_heads * n.block_size, ID),
        "hidden": (tokens, 1),
        # of options: slopes, sinks, scales, then what a mask may need
        **{"slopes": (n.heads, 4), "sinks": (n.heads, 4), "scale": (n.kv_heads, 4)},
        **{"sink_m": (n.rows, 4), "sink_s": (n.rows, 4)},
        **{"behind": (tokens, ID), "seen": (tokens, ID), "distance": (tokens, 4)},
        "dead": (tokens, 1),
    }
    num_bytes = sum(whole_blocks(numel * size, ALIGNMENT) for numel, size in sizes.values())
    memory = t.kept(num_bytes, 1)
    return SimpleNamespace(
        **{name: memory.part(numel, size) for name, (numel, size) in sizes.items()}
    )


def run(t, n, schedule, w, out):
    """Args: n: kernel_cost.Numbers;  w: what `workspace` gave;  out: the result"""
    query = w.query.view(n.rows * n.head_size)
    t.op("set up", Tensor(query.numel, n.itemsize), into=query)
    t.op("set up", query, into=query)
    if n.waves:
        _phase1(t, n, schedule, w)
    else:
        t.op("phase 2", into=w.acc_s)
        t.op("phase 2", into=w.m)
    _phase2(t, n, schedule, w)
    _write_result(t, n, w, out)


def _phase1(t, n, schedule, w):
    offsets = _row_offsets(t, n, schedule, w.key_offsets)
    _row_offsets(t, n, schedule, w.value_offsets)
    ids = schedule.blocks.view(n.blocks)
    t.op("ids", ids, ids, into=w.places)
    t.op("ids", Tensor(n.blocks, 4), w.places, into=w.table_ids.part(n.blocks, 4))
    t.op("ids", w.table_ids.part(n.blocks, 4), into=w.block_ids)
    for wave in n.waves:
        items, width = len(wave), wave[0].width
        ragged = any(n.seq_lens[seq] - start < width for seq, start, _ in wave)
        matrices = items * n.kv_heads
        written = max(2, matrices) * n.group  # rows; a batch of one is computed twice
        rows = matrices * n.group
        query = w.wave_query.view(rows * n.lanes)
        kv = w.kv.view(matrices * width * n.lanes)
        logits, m = w.logits.view(rows * width), w.wave_m.view(rows)
        dead = w.hidden.view(items * n.block_size)
        t.op("set up", Tensor(query.numel, 4), Tensor(items, ID), into=query)
        if ragged:
            t.op("mask", Tensor(n.block_size, ID), Tensor(items, ID), into=dead)

        _fetch(t, n, w, offsets, items * width // n.block_size)
        query, k = query.view(rows * n.head_size), kv.view(matrices * width * n.head_size)
        t.gemm("GEMMs", query, k, into=w.logits.view(written * width))
        if ragged:
            last = logits.view(rows * n.block_size)
            t.op("mask", last, dead, into=last)
        t.op("softmax", logits, into=m)
        t.op("softmax", m, into=m)  # clamped
        t.op("softmax", logits, m, into=logits)
        t.op("softmax", logits, into=logits)  # exp
        t.gemm("GEMMs", logits, Tensor(width, 4), into=w.wave_s.view(written))

        _fetch(t, n, w, offsets, items * width // n.block_size)
        if ragged:
            last = kv.view(matrices * n.block_size * n.lanes)
            t.op("mask", last, dead, into=last)
        t.gemm("GEMMs", logits, kv, into=w.wave_acc.view(written * n.lanes))

        places = schedule.state_rows.view(rows)
        for state in (w.wave_acc.view(rows * n.head_size), w.wave_s.view(rows), m):
            t.op("states", places, state, into=Tensor(state.numel, 4))


def _row_offsets(t, n, schedule, into):
    """Where a row is a block's tokens and a block's heads lie side by side, there is no more to
    say than the numbers of the heads."""
    heads = schedule.counting.view(n.kv_heads)
    if n.apart:
        t.op("ids", heads, into=into)
        return t.op("ids", into, schedule.counting.view(n.block_size), into=into)
    if n.kv_heads > 1:
        return heads
    return t.op("ids", heads, into=into.view(n.kv_heads))


def _fetch(t, n, w, offsets, blocks):
    """K, or V, of a wave, in float32; only the "vllm" layout's lanes change their order."""
    row_ids = w.row_ids.view(blocks * offsets.numel)
    t.op("ids", offsets, w.block_ids.view(blocks), into=row_ids)
    numel = blocks * n.block_size * n.kv_heads * n.head_size
    raw = (w.raw if n.converts else w.kv).view(numel)
    copy = t.rearrange if n.permuted else t.op
    copy("gather", Tensor(numel, n.itemsize), row_ids, into=raw)
    if n.converts:
        t.op("convert", raw, into=w.kv.view(numel))


def _phase2(t, n, schedule, w):
    left = n.rows
    for partitions, seqs in groupby(sorted(n.partitions, reverse=True)):
        rows = len(list(seqs)) * n.heads
        acc_s, m = Tensor(rows * partitions * n.state, 4), Tensor(rows * partitions, 4)
        merged, merged_m = w.merged_acc_s.view(rows * n.state), w.merged_m.view(rows)
        if partitions == 0:
            t.op("phase 2", into=w.merged_acc_s.view((left + 1) * n.state))
            t.op("phase 2", into=merged_m)
        elif partitions == 1:
            t.op("phase 2", acc_s, into=merged)
            t.op("phase 2", m, into=merged_m)
        else:
            weights = w.weights.view(m.numel)
            t.op("phase 2", m, into=merged_m)
            t.op("phase 2", m, merged_m, into=weights)
            t.op("phase 2", weights, into=weights)  # exp
            t.gemm("phase 2", weights, acc_s, into=w.merged_acc_s.view(max(2, rows) * n.state))
        left -= rows
    if n.moved:
        merged = w.merged_acc_s.view(n.rows * n.state)
        t.op("phase 2", merged, schedule.inverse, into=w.sorted_acc_s)
        t.op("phase 2", w.merged_m, schedule.inverse, into=w.sorted_m)


def _write_result(t, n, w, out):
    s, acc = w.merged_acc_s.view(n.rows), w.merged_acc_s.view(n.rows * n.head_size)
    t.op("output", s, into=w.empty)
    t.op("output", s, into=s)  # clamped
    t.op("output", acc, s, into=acc)
    t.op("output", acc, w.empty, into=acc)
    t.op("output", acc, into=out)
