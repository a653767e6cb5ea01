"""What a plan can't be made from, and what its run refuses: by name and value, nothing moved.

A run checks all that is not a value, as `paged_attention` does (the same faults), and that the
tensors are those that were planned for.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from faults.calls import BLOCK, HEADS, KV_HEADS, LENS, SIZE, WRONG, good, refused
from faults.inputs import INPUT_FAULTS
from faults.options import CACHE_FAULTS, LOGIT_FAULTS, OUT_FAULTS
from helpers import INF, NAN, assert_same

from paged_attention import Workspace, plan_decode

pytestmark = pytest.mark.quick

SIZES = {
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_size": SIZE,
    "block_size": BLOCK,
    "layout": "HND",
}
KINDS = {
    "exact": {**SIZES, "seq_lens": LENS},
    "capacity": {**SIZES, "num_seqs": 2, "max_seq_len": 9},
}
in_each_kind = pytest.mark.parametrize("kind", KINDS)
CAPACITY = {"seq_lens": None, "num_seqs": 2, "max_seq_len": 9}

PLAN_FAULTS = [
    *(
        ({name: value}, (name, repr(value)))
        for name in (*list(SIZES)[:4], "q_len", "window", "partition_size")
        for value in (0, -1, 2.5, "3", True, NAN, [2])
    ),
    *(({name: None}, (name, "None")) for name in (*SIZES, "q_len", "dtype")),
    ({"num_heads": 5}, ("num_heads", "5", "2")),
    ({"layout": "hnd"}, ("layout", "hnd", "HND")),
    ({"layout": 3}, ("layout", "3")),
    ({"layout": "vllm", "head_size": 18}, ("vllm", "18", "4")),
    ({"layout": "vllm", "head_size": 24, "dtype": torch.uint8}, ("vllm", "24", "16")),
    ({"dtype": torch.float64}, ("dtype", "float64")),
    ({"dtype": torch.int8}, ("dtype", "int8")),
    ({"dtype": "float32"}, ("dtype", "float32")),
    ({"backend": "flash"}, ("backend", "flash")),
    ({"backend": 1}, ("backend", "1")),
    ({"seq_lens": None}, ("seq_lens", "num_seqs", "None")),
    ({"seq_lens": None, "num_seqs": 2}, ("max_seq_len", "None")),
    *(
        ({**CAPACITY, name: value}, (name, repr(value)))
        for name in ("num_seqs", "max_seq_len")
        for value in (-1, 1.5, "2", True)
    ),
    ({"seq_lens": [3, -1]}, ("seq_lens[1]", "-1")),
    ({"seq_lens": [3, 1.5]}, ("seq_lens[1]", "1.5")),
    ({"seq_lens": [3, None]}, ("seq_lens[1]", "None")),
    ({"seq_lens": [3, True]}, ("seq_lens[1]", "True")),
    ({"seq_lens": 3}, ("seq_lens", "3")),
    ({"seq_lens": "33"}, ("seq_lens", "33")),
    ({"seq_lens": torch.tensor([1.5])}, ("seq_lens", "1.5")),
    ({"seq_lens": torch.tensor([[1]])}, ("seq_lens", "[1]")),
    ({"seq_lens": torch.tensor(7)}, ("seq_lens", "7")),
    ({"seq_lens": torch.tensor([-2])}, ("seq_lens[0]", "-2")),
    ({"seq_lens": torch.tensor([1], device="meta")}, ("seq_lens", "meta")),
    ({"num_seqs": 3}, ("num_seqs", "3", "2")),
    ({"max_seq_len": 6}, ("max_seq_len", "6", "7")),
    ({"max_seq_len": "9"}, ("max_seq_len", "9")),
]


@pytest.mark.parametrize("change, words", PLAN_FAULTS)
def test_a_plan_that_cannot_be_made_is_refused_by_name_and_value(change, words):
    with pytest.raises(WRONG) as caught:
        plan_decode(**{**KINDS["exact"], **change})
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} doesn't mention {missing}"


def run_of(kind, **changes):
    return plan_decode(**{**KINDS[kind], **changes}).run


def call_of_a_run():
    call = good()
    del call["layout"]
    return call


def test_the_run_that_the_faults_are_put_into_works():
    for kind in KINDS:
        call = call_of_a_run()
        assert_same(run_of(kind)(**call), call["out"])
        assert not (call["out"] == 7.0).any()


FAULTS = {**INPUT_FAULTS, **LOGIT_FAULTS, **CACHE_FAULTS, **OUT_FAULTS}


@in_each_kind
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_refuses_what_a_call_refuses_without_reading_a_value(kind, fault):
    name, wrong, words = FAULTS[fault]
    call = call_of_a_run()
    value = wrong(call)
    call.update(value if isinstance(value, dict) else {name: value})
    refused(run_of(kind), call, (name, *words))


NOT_PLANNED = {  # what was planned, what was given, words
    "other heads": ({"num_heads": 2}, lambda c: {}, ("query", "4", "2")),
    "other KV heads": ({"num_kv_heads": 1}, lambda c: {}, ("key_cache", "2", "1")),
    "another head size": ({"head_size": 8}, lambda c: {}, ("key_cache", "16", "8")),
    "another block size": ({"block_size": 8}, lambda c: {}, ("key_cache", "4", "8")),
    "another layout": ({"layout": "vllm"}, lambda c: {}, ("key_cache", "vllm")),
    "another dtype": ({"dtype": torch.float16}, lambda c: {}, ("key_cache", "float32", "float16")),
    "bytes": ({"dtype": torch.uint8}, lambda c: {}, ("key_cache", "float32", "uint8")),
    "another q_len": ({"q_len": 2}, lambda c: {}, ("query", "1", "2")),
    "rows not planned": (
        {},
        lambda c: {"query": torch.zeros(2, 3, 4, 16), "out": torch.full((2, 3, 4, 16), 7.0)},
        ("query", "3", "1"),
    ),
    "more sequences": (
        {},
        lambda c: {
            "query": c["query"].repeat(2, 1, 1),
            "block_tables": c["block_tables"].repeat(2, 1),
            "seq_lens": c["seq_lens"].repeat(2),
            "out": c["out"].repeat(2, 1, 1),
        },
        ("query", "4", "2"),
    ),
    "slopes not causal": (
        {},
        lambda c: {"alibi_slopes": torch.ones(4), "causal": False},
        ("alibi_slopes", "causal"),
    ),
    "a window not causal": ({"window": 3}, lambda c: {"causal": False}, ("window", "3", "causal")),
    "a wide window not causal": (
        {"window": 300},
        lambda c: {"causal": False},
        ("window", "300", "causal"),
    ),
}


@in_each_kind
@pytest.mark.parametrize("fault", NOT_PLANNED)
def test_a_run_on_what_was_not_planned_is_refused_by_name(kind, fault):
    planned, change, words = NOT_PLANNED[fault]
    call = call_of_a_run()
    refused(run_of(kind, **planned), {**call, **change(call)}, words)


def test_an_exact_plan_needs_a_table_and_a_pool_that_can_hold_its_longest_sequence():
    call = call_of_a_run()
    narrow = {"block_tables": call["block_tables"][:, :1]}
    refused(run_of("exact"), {**call, **narrow}, ("block_tables", "4", "7"))
    empty = {name: call[name][:0] for name in ("key_cache", "value_cache")}
    refused(run_of("exact"), {**call, **empty}, ("0 blocks",))


@pytest.mark.parametrize("name", ["window", "layout", "partition_size", "max_seq_len", "validate"])
def test_what_is_the_plans_is_no_argument_of_its_run(name):
    with pytest.raises(TypeError, match=name):
        run_of("exact")(**call_of_a_run(), **{name: 3})


@in_each_kind
def test_no_argument_of_a_run_takes_just_anything(kind):
    run = run_of(kind)
    for name in inspect.signature(run).parameters:
        for wrong in (object(), "wrong", [1.5], {}, 1j, b"1"):
            with pytest.raises(WRONG, match=name):
                run(**{**call_of_a_run(), name: wrong})


@in_each_kind
def test_out_in_the_workspace_is_refused_wherever_it_lies(kind):
    run, workspace, call = run_of(kind), Workspace(), call_of_a_run()
    run(**call, workspace=workspace)
    [memory] = workspace.tensors()
    for first in range(0, memory.numel() - call["out"].numel(), 499):
        call["out"] = memory[first : first + call["out"].numel()].view(call["out"].shape)
        with pytest.raises(ValueError, match="out must not overlap workspace"):
            run(**call, workspace=workspace)


@in_each_kind
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_run_that_reads_no_value_hides_none(kind, bad):
    """NaN in a slope, a sink or a scale is NaN in what it touches, and in nothing else."""
    for name, n in (("alibi_slopes", HEADS), ("sinks", HEADS), ("v_scale", KV_HEADS)):
        value = torch.full((n,), 0.5)
        value[-1] = bad
        call = call_of_a_run()
        out = run_of(kind)(**call, **{name: value})
        touched = HEADS // n
        assert not out[:, -touched:].isfinite().all(), name
        assert out[:, :-touched].isfinite().all(), name
