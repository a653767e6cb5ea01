"""A plan is made once a step, from lengths alone; a run reads no value and allocates nothing."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from helpers import (
    DTYPES,
    assert_close,
    assert_same,
    in_each_layout,
    on_each_device,
    oracle,
    pairwise,
    rounding,
)
from pools import LAYOUTS, NAN, paged, random, to

from paged_attention import DecodePlan, Workspace, paged_attention, plan_decode
from paged_attention.kernel.workspace import default_workspace

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 8
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "block_size": BLOCK}
in_each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def planned(layout, dtype=torch.float32, device="cpu", **lengths):
    return plan_decode(**SIZES, layout=layout, dtype=dtype, device=device, **lengths)


def batch(lens, layout, dtype=torch.float32, device="cpu", **where):
    dense = random(lens, HEADS, KV_HEADS, SIZE, seed=sum(lens), sharp=4.0, dtype=dtype)
    return dense, paged(to(dense, device=device), BLOCK, layout, device=device, **where)


def poisoned(workspace):
    for tensor in workspace.tensors():
        tensor.fill_(NAN)


# -- the same answers


@pytest.mark.quick
@on_each_device
@pairwise(layout=LAYOUTS, dtype=DTYPES, partition_size=(8, 24, None))
def test_an_exact_plan_gives_the_bits_of_paged_attention(device, row):
    layout, dtype, partition_size = row.values()
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
        inputs = dense.query.to(device), *pool[:3], lens_on_device
        got, lse = plan.run(*inputs, out=out, workspace=workspace, return_lse=True)
        right, right_lse = oracle(*dense)
        assert got is out
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


# -- beyond the capacity


@in_each_layout
@pytest.mark.parametrize("max_seq_len, columns", [(200, 5), (40, 12)])
def test_a_sequence_longer_than_a_capacity_plan_can_serve_becomes_nan_and_no_other_does(
    layout, max_seq_len, columns
):
    """Neither a part of it nor another's blocks, which lie next to its row's end in the table."""
    dense, (key, value, tables, lens) = batch([75, 9, 33], layout)
    plan, tables = planned(layout, num_seqs=3, max_seq_len=max_seq_len), tables[:, :columns]
    out, lse = plan.run(dense.query, key, value, tables.contiguous(), lens, return_lse=True)
    right, right_lse = oracle(*dense)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert_close(out[1:], right[1:])
    assert_close(lse[1:], right_lse[1:])


@pytest.mark.parametrize("lacking", ["columns", "blocks", "capacity"])
def test_a_sequence_that_no_memory_could_hold_becomes_nan_too(lacking):
    dense, (key, value, tables, lens) = batch([5, 0], "HND")
    plan = planned("HND", num_seqs=2, max_seq_len=0 if lacking == "capacity" else 64)
    tables = tables[:, :0] if lacking == "columns" else tables
    key, value = (x[:0] if lacking == "blocks" else x for x in (key, value))
    inputs = dense.query, key, value, tables, lens
    for tensor in (plan.run(*inputs), *plan.run(*inputs, return_lse=True)):
        assert tensor[0].isnan().all() and not tensor[1].isnan().any()
