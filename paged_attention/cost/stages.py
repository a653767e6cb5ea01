"""The stages as `cost.predict` sees them: each one's operations, in order, with their bytes.

Read a function here beside the stage of its name. `t` is the tape, `n` holds the numbers of the
sequence at hand, and `x` the stage's variables, under its names and alive as long as there: what
the last partition or the last sequence left behind still lives while the next one's is made.
"""

from __future__ import annotations

from types import SimpleNamespace

from paged_attention.cost.stage_steps import (
    all_partitions,
    as_float,
    convert,
    fused_merge,
    gather,
    merge,
    one_softmax,
    output,
    padded_softmax,
    partition_by_partition,
    scale_query,
    sequences,
)
from paged_attention.cost.tape import Tensor


def naive_loops(t, shape):
    out, x = output(t, shape), SimpleNamespace()
    for n in sequences(t, shape):
        scale_query(t, n, x)
        x.k = t.empty("fetch", n.kv(n.blocks * n.block_size), n.itemsize)
        x.v = t.empty("fetch", n.kv(n.blocks * n.block_size), n.itemsize)
        block = Tensor(n.kv(n.block_size), n.itemsize)
        t.host_read("fetch", times=n.blocks)  # the block ids
        t.rearrange("fetch", block, into=x.k.view(block.numel), times=n.blocks)
        t.rearrange("fetch", block, into=x.v.view(block.numel), times=n.blocks)
        partition_by_partition(t, n, x, by_einsum=True)
        merge(t, n, x, out)
    return out


def batched_gather(t, shape):
    out, x = output(t, shape), SimpleNamespace()
    for n in sequences(t, shape):
        scale_query(t, n, x)
        gather(t, n, x)
        partition_by_partition(t, n, x, by_einsum=False)
        merge(t, n, x, out)
    return out


def single_bmm(t, shape):
    out, x = output(t, shape), SimpleNamespace()
    for n in sequences(t, shape):
        scale_query(t, n, x)
        gather(t, n, x)
        repeated = n.group * n.kv(n.tokens)
        x.k = t.rearrange("repeat", as_float(t, n, x.k.view(n.kv(n.tokens))), new=repeated)
        x.v = t.rearrange("repeat", as_float(t, n, x.v.view(n.kv(n.tokens))), new=repeated)
        padded_softmax(t, n, x, kv_heads=n.heads)
        normalised = t.op("softmax", x.weights, x.s, new=n.heads * n.padded)
        x.partial_out = t.gemm("GEMMs", normalised, x.v_padded, new=n.partials)
        del normalised  # the stage doesn't name it
        merge(t, n, x, out)
    return out


def gqa_broadcast(t, shape):
    out, x = output(t, shape), SimpleNamespace()
    for n in sequences(t, shape):
        scale_query(t, n, x)
        gather(t, n, x)
        convert(t, n, x)
        all_partitions(t, n, x)
        merge(t, n, x, out)
    return out


def single_tile(t, shape):
    out, x = output(t, shape), SimpleNamespace()
    for n in sequences(t, shape):
        scale_query(t, n, x)
        gather(t, n, x)
        convert(t, n, x)
        if n.partitions == 1:
            one_softmax(t, n, x, out)
            continue
        all_partitions(t, n, x)
        merge(t, n, x, out)
    return out


def fused_phase2(t, shape):
    out, x = output(t, shape), SimpleNamespace()
    for n in sequences(t, shape):
        scale_query(t, n, x)
        gather(t, n, x)
        convert(t, n, x)
        if n.partitions == 1:
            one_softmax(t, n, x, out)
            continue
        all_partitions(t, n, x)
        fused_merge(t, n, x, out)
    return out


STAGE_COSTS = {
    stage.__name__: stage
    for stage in (
        naive_loops,
        batched_gather,
        single_bmm,
        gqa_broadcast,
        single_tile,
        fused_phase2,
    )
}
