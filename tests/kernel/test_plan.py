"""A plan is made once a step, from lengths alone; a run reads no value and allocates nothing."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from helpers import (
    DTYPES,
    INF,
    LAYOUTS,
    NAN,
    assert_close,
    assert_same,
    cuda,
    in_each_layout,
    on_each_device,
    oracle,
    paged,
    random,
    rounding,
    to,
)
from hypothesis import given
from hypothesis import strategies as st

from paged_attention import DecodePlan, Workspace, paged_attention, plan_decode
from paged_attention.inputs import random_inputs
from paged_attention.kernel.device import OPS_PER_WAVE
from paged_attention.kernel.workspace import default_workspace
from paged_attention.measure.counting import OpCounter, count

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 8
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def planned(layout, dtype=torch.float32, device="cpu", **lengths):
    return plan_decode(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        block_size=BLOCK,
        layout=layout,
        dtype=dtype,
        device=device,
        **lengths,
    )


def batch(lens, layout, dtype=torch.float32, device="cpu", **where):
    dense = random(lens, HEADS, KV_HEADS, SIZE, seed=sum(lens), sharp=4.0, dtype=dtype)
    return dense, paged(to(dense, device=device), BLOCK, layout, device=device, **where)


def poisoned(workspace):
    for tensor in workspace.tensors():
        tensor.fill_(NAN)


# -- the same answers


@pytest.mark.quick
@on_each_device
@in_each_layout
@in_each_dtype
@pytest.mark.parametrize("partition_size", [8, 24, None])
def test_an_exact_plan_gives_the_bits_of_paged_attention(device, layout, dtype, partition_size):
    lens = [75, 0, 3, 200, 8]
    dense, pool = batch(lens, layout, dtype, device)
    query = dense.query.to(device)
    how = {"scale": 0.3, "k_scale": 0.5, "v_scale": torch.tensor([2.0, -1.0]).to(device)}
    right = paged_attention(
        query, *pool, layout=layout, partition_size=partition_size, return_lse=True, **how
    )
    plan = planned(layout, dtype, device, seq_lens=lens, partition_size=partition_size)
    assert isinstance(plan, DecodePlan)
    for _ in range(2):
        out, lse = plan.run(query, *pool, return_lse=True, **how)
        assert_same(out, right[0])
        assert_same(lse, right[1], "lse")


@pytest.mark.quick
@on_each_device
@in_each_layout
@in_each_dtype
def test_one_capacity_plan_is_right_for_any_lengths_changed_in_place(device, layout, dtype):
    """Garbage ids past the end, NaN in every unused slot, in the workspace and in `out`."""
    capacity, workspace = 100, Workspace()
    plan = planned(layout, dtype, device, num_seqs=4, max_seq_len=capacity, partition_size=32)
    lens_on_device = torch.zeros(4, dtype=torch.int32, device=device)
    for lens in ([100, 1, 0, 33], [0, 0, 0, 0], [7, 99, 64, 32], [8, 16, 100, 100], [1, 2, 3, 4]):
        dense, pool = batch(lens, layout, dtype, device)
        lens_on_device.copy_(pool.seq_lens)
        poisoned(workspace)
        out = torch.full_like(dense.query, NAN, device=device)
        got, lse = plan.run(
            dense.query.to(device),
            *pool[:3],
            lens_on_device,
            out=out,
            workspace=workspace,
            return_lse=True,
        )
        right, right_lse = oracle(*dense)
        assert got is out
        assert_close(out, right, extra=rounding(dense))
        assert_close(lse, right_lse, extra=rounding(dense), what="lse")


@given(data=st.data())
def test_capacity_plans_are_right_whatever_the_capacity(data):
    draw = data.draw
    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES))
    lens = draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    dense, pool = batch(lens, layout, dtype, extra_columns=draw(st.integers(0, 12)))
    plan = planned(
        layout,
        dtype,
        num_seqs=len(lens),
        max_seq_len=max(lens, default=0) + draw(st.sampled_from([0, 1, 7, 90, 3000])),
        partition_size=draw(st.sampled_from([1, 16, 40, None])),
    )
    out, lse = plan.run(dense.query, *pool, return_lse=True)
    right, right_lse = oracle(*dense)
    assert_close(out, right, extra=rounding(dense))
    assert_close(lse, right_lse, extra=rounding(dense), what="lse")


@in_each_layout
def test_a_plan_serves_layers_of_other_values_strides_and_query_dtypes(layout):
    lens = [75, 9]
    plan, workspace = planned(layout, seq_lens=lens), Workspace()
    for layer in range(3):
        dense, pool = batch(lens, layout, seed=layer)
        both = torch.stack([pool.key_cache.flatten(), pool.value_cache.flatten()], 1)
        key, value = (both[:, i].view(c.shape) for i, c in enumerate(pool[:2]))
        for query in (dense.query, dense.query[:, None], dense.query.bfloat16()):
            out = plan.run(query, *pool, workspace=workspace)
            strided = plan.run(query, key, value, *pool[2:], workspace=workspace)
            assert_same(strided, out)
            right = oracle(query.view(dense.query.shape), dense.keys, dense.values)[0]
            assert_close(out.view(right.shape), right, extra=rounding(dense))


@in_each_layout
def test_exact_plans_do_not_read_seq_lens(layout):
    dense, pool = batch([75, 9], layout)
    out = planned(layout, seq_lens=torch.tensor([75, 9])).run(
        dense.query, *pool[:3], torch.tensor([-3, 10**6])
    )
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))


@in_each_layout
def test_a_pool_without_blocks_and_a_table_without_columns_serve_a_capacity_plan(layout):
    dense, pool = batch([0, 0], layout, spare=0, extra_columns=0)
    out, lse = planned(layout, num_seqs=2, max_seq_len=50).run(dense.query, *pool, return_lse=True)
    assert (out == 0).all() and (lse == -INF).all()


# -- nothing read, nothing allocated


PLANS = {
    "exact": {"seq_lens": [75, 0, 3, 200]},
    "capacity": {"num_seqs": 4, "max_seq_len": 256},
}


@pytest.mark.quick
@in_each_layout
@in_each_dtype
@pytest.mark.parametrize("kind", PLANS)
def test_a_run_reads_nothing_back_and_allocates_nothing(layout, dtype, kind):
    dense, pool = batch([75, 0, 3, 200], layout, dtype)
    plan = planned(layout, dtype, **PLANS[kind], partition_size=64)
    workspace, out = Workspace(), torch.empty_like(dense.query)
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor(0.5)}
    plan.run(dense.query, *pool, out=out, workspace=workspace, **scales)
    assert workspace.nbytes == plan.workspace_bytes
    with OpCounter() as counter:
        plan.run(dense.query, *pool, out=out, workspace=workspace, **scales)
    assert counter.host_reads == 0
    assert counter.peak_bytes == 0, counter.counts()
    assert workspace.nbytes == plan.workspace_bytes


def optioned(device="cpu", **changes):
    """Options of a run, all at once."""
    options = {
        "k_scale": torch.tensor([0.5, 2.0], dtype=torch.float64),
        "v_scale": torch.tensor(0.5),
        "alibi_slopes": torch.linspace(0.0, 1.0, HEADS, dtype=torch.float16),
        "sinks": torch.linspace(-3.0, 3.0, HEADS, dtype=torch.float64),
    }
    return {name: x.to(device) for name, x in options.items()} | {"softcap": 20.0} | changes


@pytest.mark.quick
@in_each_layout
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2", None])
@pytest.mark.parametrize("kind", PLANS)
def test_options_cost_no_allocation_and_no_host_read(layout, causal, fp8, kind):
    dtype = torch.uint8 if fp8 else torch.float32
    window = {"window": 70} if causal else {}
    plan = planned(layout, dtype, **PLANS[kind], **window, q_len=3, partition_size=64)
    dense = random([75, 0, 3, 200], HEADS, KV_HEADS, SIZE, sharp=4.0)
    keys = [k.to(torch.float8_e5m2).view(torch.uint8) for k in dense.keys] if fp8 else dense.keys
    values = keys if fp8 else dense.values
    pool = paged(
        dense._replace(keys=keys, values=values),
        BLOCK,
        layout,
        poison=(0, 0) if fp8 else (NAN, NAN),
    )
    query = dense.query.unsqueeze(1).expand(-1, 3, -1, -1)
    options = optioned(causal=causal, kv_cache_dtype=fp8 or "auto")
    if not causal:
        del options["alibi_slopes"]
    workspace, out = Workspace(), torch.empty(query.shape)
    plan.run(query, *pool, out=out, workspace=workspace, **options)
    with OpCounter() as counter:
        plan.run(query, *pool, out=out, workspace=workspace, **options)
    assert counter.host_reads == 0
    assert counter.peak_bytes == 0, counter.counts()
    on_meta = planned(layout, dtype, "meta", **PLANS[kind], **window, q_len=3, partition_size=64)
    options = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in options.items()}
    assert on_meta.run(query.to("meta"), *(x.to("meta") for x in pool), **options).is_meta


@in_each_layout
@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_runs_on_tensors_without_values(layout, kind):
    plan = planned(layout, device="meta", **PLANS[kind])
    dense, pool = batch([75, 0, 3, 200], layout)
    inputs = [x.to("meta") for x in (dense.query, *pool)]
    out, lse = plan.run(*inputs, return_lse=True)
    assert out.is_meta and out.shape == dense.query.shape and lse.shape == dense.query.shape[:2]


def test_lengths_on_the_device_and_a_bound_need_no_host_read():
    """`meta` can't be read: what would synchronise on an accelerator raises there."""
    dense, pool = batch([75, 3], "HND")
    inputs = [x.to("meta") for x in (dense.query, *pool)]
    out = paged_attention(*inputs, layout="HND", max_seq_len=80, validate=False)
    assert out.shape == dense.query.shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        paged_attention(*inputs, layout="HND", max_seq_len=80)


def test_a_wave_takes_as_many_ops_as_the_device_profiles_say():
    def ops(tokens):
        x = random_inputs([tokens], layout="HND", device="meta")
        plan = plan_decode(
            num_heads=24,
            num_kv_heads=4,
            head_size=256,
            block_size=16,
            layout="HND",
            device="meta",
            seq_lens=[tokens],
        )
        x = x._replace(block_tables=x.block_tables.to("meta"))
        return count(lambda: plan.run(*x)).ops

    assert ops(32 * 1024) - ops(12 * 1024) == 10 * OPS_PER_WAVE


@pytest.mark.cuda
@pytest.mark.parametrize("device", [cuda])
@in_each_layout
def test_a_captured_capacity_plan_replays_with_changed_lengths(device, layout):
    plan = planned(layout, device=device, num_seqs=2, max_seq_len=256)
    dense, pool = batch([256, 256], layout, device=device)
    workspace, out = Workspace(), torch.empty_like(dense.query, device=device)
    lens, query = pool.seq_lens.clone(), dense.query.to(device)

    def step():
        plan.run(query, *pool[:3], lens, out=out, workspace=workspace)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for changed in ([256, 1], [0, 17], [200, 255]):
        lens.copy_(torch.tensor(changed, dtype=lens.dtype))
        out.fill_(NAN)
        graph.replay()
        keys = [k[:n] for k, n in zip(dense.keys, changed)]
        values = [v[:n] for v, n in zip(dense.values, changed)]
        assert_close(out, oracle(dense.query, keys, values)[0], extra=rounding(dense))


# -- workspaces


@in_each_layout
def test_a_workspace_grows_to_the_largest_plan_and_serves_smaller_ones(layout):
    workspace = Workspace()
    assert workspace.nbytes == 0 and workspace.tensors() == []
    largest = 0
    for lens in ([9], [300, 5], [1], [2000], [40] * 7, [0]):
        dense, pool = batch(lens, layout)
        plan = planned(layout, seq_lens=lens)
        poisoned(workspace)
        out = plan.run(dense.query, *pool, workspace=workspace)
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))
        largest = max(largest, plan.workspace_bytes)
        assert workspace.nbytes == largest == sum(t.nbytes for t in workspace.tensors())
    workspace.clear()
    assert workspace.nbytes == 0 and workspace.tensors() == []
    plan.run(dense.query, *pool, workspace=workspace)


def test_a_workspace_lies_on_one_device():
    dense, pool = batch([9], "HND")
    for workspace in (Workspace("meta"), Workspace(torch.device("meta"))):
        with pytest.raises(ValueError, match="workspace must be on cpu like query, got meta"):
            paged_attention(dense.query, *pool, layout="HND", workspace=workspace)
    with pytest.raises(TypeError, match="workspace must be a Workspace, got dict"):
        planned("HND", seq_lens=[9]).run(dense.query, *pool, workspace={})


def test_each_thread_has_a_default_workspace_of_its_own_which_goes_with_it():
    dense, pool = batch([300], "HND")
    right = paged_attention(dense.query, *pool, layout="HND")
    mine, theirs = default_workspace(torch.device("cpu")), []
    assert mine.nbytes and default_workspace(torch.device("cpu")) is mine

    def elsewhere():
        assert_same(paged_attention(dense.query, *pool, layout="HND"), right)
        theirs.append(weakref.ref(default_workspace(torch.device("cpu"))))
        assert theirs[0]() is not mine and theirs[0]().nbytes

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert theirs[0]() is None
    mine.clear()
    assert mine.nbytes == 0
    assert_same(paged_attention(dense.query, *pool, layout="HND"), right)


def test_a_workspace_made_in_inference_mode_serves_outside_of_it():
    dense, pool = batch([300], "HND")
    plan, workspace = planned("HND", seq_lens=[300]), Workspace()
    with torch.inference_mode():
        first = plan.run(dense.query, *pool, workspace=workspace).clone()
    second = plan.run(dense.query, *pool, workspace=workspace)
    with torch.inference_mode():
        third = plan.run(dense.query, *pool, workspace=workspace)
    assert torch.equal(first, second) and torch.equal(second, third)


def test_caches_that_require_grad_are_read_without_a_graph():
    dense, pool = batch([30], "HND")
    right = paged_attention(dense.query, *pool, layout="HND")
    caches = [c.clone().requires_grad_() for c in pool[:2]]
    out = paged_attention(dense.query.requires_grad_(), *caches, *pool[2:], layout="HND")
    assert_same(out, right)
    assert not out.requires_grad


# -- refusals


GOOD = {
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_size": 16,
    "block_size": 8,
    "layout": "HND",
    "seq_lens": [75, 9],
}
PLAN_FAULTS = [
    ({"num_heads": 5}, ValueError, ("num_heads", "5", "2")),
    ({"num_heads": 0}, ValueError, ("num_heads", "0")),
    ({"num_kv_heads": None}, TypeError, ("num_kv_heads", "None")),
    ({"head_size": 16.0}, TypeError, ("head_size", "16.0")),
    ({"block_size": -1}, ValueError, ("block_size", "-1")),
    ({"layout": "hnd"}, ValueError, ("layout", "hnd", "HND")),
    ({"layout": None}, ValueError, ("layout", "None")),
    ({"layout": "vllm", "head_size": 18}, ValueError, ("vllm", "18")),
    ({"dtype": torch.float64}, TypeError, ("dtype", "float64")),
    ({"dtype": "float32"}, TypeError, ("dtype", "float32")),
    ({"dtype": torch.int8}, TypeError, ("dtype", "int8")),
    ({"seq_lens": None}, ValueError, ("num_seqs",)),
    ({"seq_lens": None, "num_seqs": 2}, ValueError, ("max_seq_len",)),
    ({"seq_lens": None, "num_seqs": 2, "max_seq_len": -1}, ValueError, ("max_seq_len", "-1")),
    ({"seq_lens": [3, -1]}, ValueError, ("seq_lens[1]", "-1")),
    ({"seq_lens": [3, 1.5]}, TypeError, ("seq_lens[1]", "1.5")),
    ({"seq_lens": [3, None]}, TypeError, ("seq_lens[1]", "None")),
    ({"seq_lens": 3}, TypeError, ("seq_lens", "3")),
    ({"seq_lens": torch.tensor([1.5])}, TypeError, ("seq_lens[0]", "1.5")),
    ({"seq_lens": torch.tensor([[1]])}, TypeError, ("seq_lens[0]", "[1]")),
    ({"seq_lens": torch.tensor(7)}, TypeError, ("seq_lens", "7")),
    ({"seq_lens": torch.tensor([1], device="meta")}, ValueError, ("seq_lens", "meta")),
    ({"num_seqs": 3}, ValueError, ("num_seqs", "3", "2")),
    ({"max_seq_len": 74}, ValueError, ("max_seq_len", "74", "75")),
    ({"partition_size": 0}, ValueError, ("partition_size", "0")),
    ({"partition_size": "x"}, TypeError, ("partition_size", "x")),
    ({"backend": "flash"}, ValueError, ("backend", "flash")),
    ({"q_len": 2.0}, TypeError, ("q_len", "2.0")),
    ({"q_len": 0}, ValueError, ("q_len", "0")),
    ({"window": 4.0}, TypeError, ("window", "4.0")),
    ({"window": 0}, ValueError, ("window", "0")),
]


@pytest.mark.quick
@pytest.mark.parametrize("change, error, words", PLAN_FAULTS)
def test_a_plan_that_cannot_be_made_is_refused_by_name(change, error, words):
    with pytest.raises(error) as caught:
        plan_decode(**{**GOOD, **change})
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} doesn't mention {missing}"


RUN_FAULTS = {
    "another number of sequences": (lambda c: [x[:1] for x in (c[0],)] + c[1:3] + [
        c[3][:1], c[4][:1]], ("query", "1", "2")),
    "other heads": (lambda c: [c[0][:, :4], *c[1:]], ("query", "4", "6")),
    "another dtype": (lambda c: [c[0], c[1].half(), c[2].half(), *c[3:]],
                      ("key_cache", "float16")),
    "another geometry": (lambda c: [c[0], c[1][:, :1], c[2][:, :1], *c[3:]], ("key_cache", "1")),
    "another device": (lambda c: [x.to("meta") for x in c], ("query", "meta", "cpu")),
    "another layout": (lambda c: [c[0], c[1][None], *c[2:]], ("key_cache", "HND")),
    "a table too narrow": (lambda c: [*c[:3], c[3][:, :9], c[4]], ("block_tables", "72", "75")),
    "a pool without blocks": (lambda c: [c[0], c[1][:0], c[2][:0], *c[3:]], ("0 blocks",)),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_run_on_what_was_not_planned_is_refused_by_name(fault):
    wrong, words = RUN_FAULTS[fault]
    dense, pool = batch([75, 9], "HND")
    out = torch.full_like(dense.query, 7.0)
    plan = plan_decode(**GOOD)
    with pytest.raises((ValueError, TypeError)) as caught:
        plan.run(*wrong([dense.query, *pool]), out=out)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} doesn't mention {missing}"
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "change, error, word",
    [
        ({"softcap": 0.0}, ValueError, "softcap"),
        ({"sinks": torch.zeros(HEADS + 1)}, ValueError, "sinks"),
        ({"alibi_slopes": torch.zeros(HEADS, 1)}, ValueError, "alibi_slopes"),
        ({"causal": False, "alibi_slopes": torch.zeros(HEADS)}, ValueError, "alibi_slopes"),
        ({"return_lse": 1}, TypeError, "return_lse"),
        ({"kv_cache_dtype": "fp8"}, ValueError, "kv_cache_dtype"),
        ({"window": 3}, TypeError, "window"),
        ({"layout": "HND"}, TypeError, "layout"),
    ],
)
def test_a_runs_options_are_refused_by_name(change, error, word):
    dense, pool = batch([75, 9], "HND")
    with pytest.raises(error, match=word):
        plan_decode(**GOOD).run(dense.query, *pool, **change)


def test_out_over_an_input_is_refused_by_a_run():
    dense, pool = batch([75, 9], "HND")
    with pytest.raises(ValueError, match="out must not overlap query"):
        plan_decode(**GOOD).run(dense.query, *pool, out=dense.query)


@pytest.mark.parametrize("kind", ["exact", "capacity"])
def test_out_in_the_workspace_is_refused_wherever_it_lies(kind):
    dense, pool = batch([75, 9], "HND")
    lengths = {"seq_lens": [75, 9]} if kind == "exact" else {"num_seqs": 2, "max_seq_len": 99}
    plan, workspace = planned("HND", **lengths), Workspace()
    plan.run(dense.query, *pool, workspace=workspace)
    [memory] = workspace.tensors()
    for first in range(0, memory.numel() - dense.query.numel(), 997):
        out = memory[first : first + dense.query.numel()].view(dense.query.shape)
        with pytest.raises(ValueError, match="out must not overlap workspace"):
            plan.run(dense.query, *pool, out=out, workspace=workspace)


@in_each_layout
@pytest.mark.parametrize(
    "max_seq_len, columns", [(200, 5), (40, None)], ids=["narrow table", "small capacity"]
)
def test_a_sequence_longer_than_a_capacity_plan_can_serve_becomes_nan_and_no_other_does(
    layout, max_seq_len, columns
):
    """Neither a part of it nor another's blocks, which lie next to its row's end in the table."""
    dense, (key, value, tables, lens) = batch([75, 9, 33], layout)
    plan = planned(layout, num_seqs=3, max_seq_len=max_seq_len)
    out, lse = plan.run(
        dense.query, key, value, tables[:, :columns].contiguous(), lens, return_lse=True
    )
    right, right_lse = oracle(*dense)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert_close(out[1:], right[1:])
    assert_close(lse[1:], right_lse[1:])


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("lacking", ["columns", "blocks", "capacity"])
def test_a_sequence_that_no_memory_could_hold_becomes_nan_too(lacking, return_lse):
    dense, pool = batch([5, 0], "HND")
    plan = planned("HND", num_seqs=2, max_seq_len=0 if lacking == "capacity" else 64)
    key, value, tables, lens = pool
    if lacking == "columns":
        tables = tables[:, :0]
    if lacking == "blocks":
        key, value = key[:0], value[:0]
    result = plan.run(dense.query, key, value, tables, lens, return_lse=return_lse)
    for tensor in result if return_lse else [result]:
        assert tensor[0].isnan().all() and not tensor[1].isnan().any()


@pytest.mark.parametrize("kind", PLANS)
def test_out_between_the_inputs_lanes_costs_no_operation(kind):
    """A packed QKV's own memory: told apart by strides, not address by address."""
    _, pool = batch([75, 0, 3, 200], "HND")
    packed = torch.zeros(4, 2, HEADS, SIZE)
    query, out = packed.unbind(1)
    plan, workspace = planned("HND", **PLANS[kind]), Workspace()
    plan.run(query, *pool, out=out, workspace=workspace)
    with OpCounter() as counter:
        plan.run(query, *pool, out=out, workspace=workspace)
    assert counter.host_reads == 0 and counter.peak_bytes == 0


def test_out_may_lie_between_large_tensors_and_over_no_byte_of_small_ones():
    pool = torch.zeros(600, 3, 2, 16, 64)
    key, value, spare = pool.unbind(1)
    tables, lens = torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([20])
    out = spare[7, :, 0].view(1, 2, 64)
    paged_attention(torch.zeros(1, 2, 64), key, value, tables, lens, layout="HND", out=out)
    wide = torch.zeros(1, 2, 64)  # the query is the upper halves of its elements
    query = wide.view(torch.float16)[..., 1::2]
    with pytest.raises(ValueError, match="out must not overlap query"):
        paged_attention(query, key, value, tables, lens, layout="HND", out=wide)


def test_scales_are_multiplied_as_numbers_before_they_meet_the_query():
    dense, pool = batch([40], "HND")
    plain = paged_attention(dense.query, *pool, layout="HND", scale=0.5)
    out = paged_attention(dense.query, *pool, layout="HND", scale=0.5e30, k_scale=1e-30)
    assert_close(out, plain.double())
