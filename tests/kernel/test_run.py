"""A plan's run reads nothing back to the host and allocates nothing, as a CUDA graph needs it."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, cuda, in_each_layout, oracle, pairwise, rounding
from pools import LAYOUTS, NAN, paged, random
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attention import Workspace, paged_attention, plan_decode
from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import OpCounter, count
from paged_attention.measure.profiling import profiler_peak_bytes

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 8
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "block_size": BLOCK}
LENS = [75, 0, 3, 200]
PLANS = {"exact": {"seq_lens": LENS}, "capacity": {"num_seqs": 4, "max_seq_len": 256}}
FORMATS = {
    "float32": (torch.float32, "auto"),
    "float16": (torch.float16, "auto"),
    "bfloat16": (torch.bfloat16, "auto"),
    "e4m3": (torch.uint8, "fp8_e4m3"),
    "e5m2": (torch.uint8, "fp8_e5m2"),
}
NO_OPTIONS = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor(0.5)}
OPTIONS = {
    "k_scale": torch.tensor([0.5, 2.0], dtype=torch.float64),
    "v_scale": torch.tensor(0.5),
    "sinks": torch.linspace(-3.0, 3.0, HEADS, dtype=torch.float64),
    "softcap": 20.0,
}
BIASED = {**OPTIONS, "alibi_slopes": torch.linspace(0.0, 1.0, HEADS, dtype=torch.float16)}
CALLS = {  # (query tokens, window, options of the run)
    "scales": (1, None, NO_OPTIONS),
    "all options": (3, 70, BIASED),
    "not causal": (3, None, {**OPTIONS, "causal": False}),
}


def step(layout, dtype, q_len, device="cpu", lens=LENS):
    """(query, key_cache, value_cache, block_tables, seq_lens)"""
    dense = random(lens, HEADS, KV_HEADS, SIZE, sharp=4.0)
    poison = (NAN, NAN)
    if dtype == torch.uint8:
        dense = dense._replace(keys=[k.clamp(0, 9).to(dtype) for k in dense.keys])
        dense, poison = dense._replace(values=dense.keys), (0, 0)
    query = dense.query if q_len == 1 else dense.query.unsqueeze(1).expand(-1, q_len, -1, -1)
    pool = paged(dense, BLOCK, layout, dtype=dtype, poison=poison)
    return [x.to(device) for x in (query, *pool)]


@pytest.mark.quick
@pairwise(layout=LAYOUTS, plan=PLANS, stored=FORMATS, call=CALLS, out=["apart", "beside"])
def test_a_run_reads_nothing_back_and_allocates_nothing(row):
    dtype, kv_cache_dtype = FORMATS[row["stored"]]
    q_len, window, options = CALLS[row["call"]]
    how = {**SIZES, **PLANS[row["plan"]], "layout": row["layout"], "dtype": dtype}
    how.update(q_len=q_len, window=window, partition_size=64)
    options = {**options, "kv_cache_dtype": kv_cache_dtype}
    query, *pool = step(row["layout"], dtype, q_len)
    workspace, out = Workspace(), torch.empty(query.shape)
    if row["out"] != "apart":
        query, out = torch.stack([query, query], 1).unbind(1)
    plan = plan_decode(**how)
    plan.run(query, *pool, out=out, workspace=workspace, **options)
    assert workspace.nbytes == plan.workspace_bytes
    with OpCounter() as counter:
        plan.run(query, *pool, out=out, workspace=workspace, **options)
    assert counter.host_reads == 0
    assert counter.peak_bytes == 0, counter.counts()
    assert workspace.nbytes == plan.workspace_bytes

    def on_meta(x):
        return x.to("meta") if torch.is_tensor(x) else x

    inputs, options = map(on_meta, (query, *pool)), {k: on_meta(v) for k, v in options.items()}
    out, lse = plan_decode(**how, device="meta").run(*inputs, return_lse=True, **options)
    assert out.is_meta and out.shape == query.shape and lse.shape == query.shape[:-1]


@pytest.mark.parametrize("stored", FORMATS)
def test_own_05_a_run_allocates_nothing_inside_of_an_operation_either(stored):
    """A profiler sees what a dispatch mode doesn't. A number beside a tensor takes 8 bytes."""
    dtype, kv_cache_dtype = FORMATS[stored]
    inputs, workspace = step("HND", dtype, 1), Workspace()
    plan, out = plan_decode(**SIZES, layout="HND", dtype=dtype, seq_lens=LENS), inputs[0].clone()

    def run():
        plan.run(*inputs, out=out, workspace=workspace, kv_cache_dtype=kv_cache_dtype)

    run()
    assert profiler_peak_bytes(run) <= 64  # a copy of the shortest wave takes 256


def test_lengths_on_the_device_and_a_bound_need_no_host_read():
    """`meta` can't be read: what would synchronise on an accelerator raises there."""
    inputs = step("HND", torch.float32, 1, "meta")
    out = paged_attention(*inputs, layout="HND", max_seq_len=200, validate=False)
    assert out.shape == inputs[0].shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        paged_attention(*inputs, layout="HND", max_seq_len=200)


class Dispatched(TorchDispatchMode):
    """Counts whatever PyTorch is asked for: operations, and views of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_run_makes_no_view_of_the_workspace_again():
    """28 operations, and 18 views of the call's tensors and of slices. Once there were 81."""
    inputs = random_inputs([16], num_heads=9, num_kv_heads=3, head_size=64, layout="HND")
    plan = plan_decode(
        num_heads=9, num_kv_heads=3, head_size=64, block_size=16, layout="HND", seq_lens=[16]
    )
    workspace, out = Workspace(), torch.empty_like(inputs.query)
    plan.run(*inputs, workspace=workspace, out=out)
    with Dispatched() as dispatched:
        plan.run(*inputs, workspace=workspace, out=out)
    assert dispatched.count <= 50


def test_a_wave_takes_as_many_ops_as_the_device_profiles_say():
    sizes = {"num_heads": 24, "num_kv_heads": 4, "head_size": 256, "block_size": 16}

    def ops(tokens):
        x = random_inputs([tokens], layout="HND", device="meta")
        plan = plan_decode(**sizes, layout="HND", device="meta", seq_lens=[tokens])
        return count(lambda: plan.run(*x._replace(block_tables=x.block_tables.to("meta")))).ops

    assert (
        ops(32 * 1024) - ops(12 * 1024) == 10 * 15
    )  # which docs/performance.md and notebook 07 say


@pytest.mark.cuda
@pytest.mark.parametrize("device", [cuda])
@in_each_layout
def test_a_captured_capacity_plan_replays_with_changed_lengths(device, layout):
    plan = plan_decode(**SIZES, layout=layout, device=device, num_seqs=2, max_seq_len=256)
    dense = random([256, 256], HEADS, KV_HEADS, SIZE, sharp=4.0)
    query, *pool, lens = (x.to(device) for x in (dense.query, *paged(dense, BLOCK, layout)))
    how = {"out": torch.empty_like(query), "workspace": Workspace()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan.run(query, *pool, lens, **how)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(query, *pool, lens, **how)
    for changed in ([256, 1], [0, 17], [200, 255]):
        lens.copy_(torch.tensor(changed, dtype=lens.dtype))
        how["out"].fill_(NAN)
        graph.replay()
        kept = [[x[:n] for x, n in zip(xs, changed)] for xs in (dense.keys, dense.values)]
        assert_close(how["out"], oracle(dense.query, *kept)[0], extra=rounding(dense))
