"""The three ways to decode: a call, and a run of a plan for these lengths or for a capacity."""

from __future__ import annotations

from functools import partial

import torch
from pools import NAN

from paged_attention import DecodePlan, Workspace, paged_attention, plan_decode

PLANS = ("exact", "capacity")
WAYS = ("paged_attention", *PLANS)


def block_size_of(pool, layout):
    return pool.value_cache.shape[{"vllm": 3, "HND": 2, "NHD": 1}[layout]]


def plan_of(
    kind, query, pool, layout, partition_size=None, capacity=None, window=None
) -> DecodePlan:
    """An exact plan of the pool's lengths, or a capacity plan of `capacity` (else a bit more)."""
    lens = pool.seq_lens.tolist()
    lengths = {"seq_lens": lens, "max_seq_len": capacity}
    if kind == "capacity":
        most = max([0, *lens]) + 5 if capacity is None else capacity
        lengths = {"num_seqs": len(lens), "max_seq_len": most}
    return plan_decode(
        num_heads=query.shape[-2],
        num_kv_heads=pool.value_cache.shape[2 if layout == "NHD" else 1],
        head_size=query.shape[-1],
        block_size=block_size_of(pool, layout),
        layout=layout,
        dtype=pool.key_cache.dtype,
        device=query.device,
        q_len=query.shape[1] if query.dim() == 4 else 1,
        window=window,
        partition_size=partition_size,
        **lengths,
    )


def way(kind, query, pool, layout, partition_size=None, capacity=None, window=None):
    """A function of what a plan's run takes: (query, *pool, **options) -> out, or (out, lse)."""
    if kind == "paged_attention":
        how = {"layout": layout, "partition_size": partition_size, "window": window}
        return partial(paged_attention, **how)
    return plan_of(kind, query, pool, layout, partition_size, capacity, window).run


def second_run(run, inputs, out=None, **options):
    """(out, lse) of a run whose workspace and `out` hold NaN."""
    workspace = Workspace()
    run(*inputs, workspace=workspace, **options)
    out = torch.empty_like(inputs[0]) if out is None else out
    for tensor in (*workspace.tensors(), out):
        tensor.fill_(NAN)
    given, lse = run(*inputs, workspace=workspace, out=out, return_lse=True, **options)
    assert given.data_ptr() == out.data_ptr()
    return out, lse
