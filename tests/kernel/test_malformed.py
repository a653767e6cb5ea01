"""Every argument with every fault it can have: refused by name and value, before anything moves.

A refusal names the argument and shows what was wrong; `out`, the caches and the metadata are as
they were. The faults are data, in `tests/faults/`.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from faults.calls import BLOCK, HEADS, KV_HEADS, SEQS, SIZE, WRONG, good, ids, refused
from faults.inputs import INPUT_FAULTS, VALUE_FAULTS
from faults.options import (
    CACHE_FAULTS,
    LAYOUT_FAULTS,
    LENGTH_FAULTS,
    LOGIT_FAULTS,
    LOGIT_VALUE_FAULTS,
    OUT_FAULTS,
    SWITCH_FAULTS,
    WINDOW_FAULTS,
)
from helpers import LAYOUTS, assert_same, in_each_layout, oracle, random

from paged_attention import paged_attention, reference_attention

pytestmark = pytest.mark.quick

READ_BY_THE_REFERENCE = {
    **INPUT_FAULTS,
    **VALUE_FAULTS,
    **LOGIT_FAULTS,
    **LOGIT_VALUE_FAULTS,
    **WINDOW_FAULTS,
    **CACHE_FAULTS,
    **LAYOUT_FAULTS,
}
WITHOUT_VALUES = {
    **INPUT_FAULTS,
    **LOGIT_FAULTS,
    **WINDOW_FAULTS,
    **CACHE_FAULTS,
    **LAYOUT_FAULTS,
    **OUT_FAULTS,
    **SWITCH_FAULTS,
}
FAULTS = {**WITHOUT_VALUES, **READ_BY_THE_REFERENCE, **LENGTH_FAULTS}


def test_the_call_that_the_faults_are_put_into_works():
    for layout in LAYOUTS:
        call = good(layout)
        assert_same(paged_attention(**call), call["out"])
        assert not (call["out"] == 7.0).any()


def with_fault(fault, **more):
    """(the call, words)"""
    name, wrong, words = FAULTS[fault]
    call = {**good(), **more}
    value = wrong(call)
    call.update(value if isinstance(value, dict) else {name: value})
    return call, (name, *words)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_name_and_value_and_nothing_moves(fault):
    call, words = with_fault(fault)
    refused(paged_attention, call, words)


@pytest.mark.parametrize("fault", READ_BY_THE_REFERENCE)
def test_the_reference_refuses_what_the_kernel_refuses(fault):
    call, words = with_fault(fault)
    del call["out"]
    refused(reference_attention, call, words)


@pytest.mark.parametrize(
    "fault", [f for f, (name, *_) in WITHOUT_VALUES.items() if name != "validate"]
)
def test_without_validation_only_the_values_go_unchecked(fault):
    """Ranks, shapes, dtypes, devices and overlap cost nothing to check: they always are."""
    call, words = with_fault(fault, validate=False)
    refused(paged_attention, call, words)


NOTHING_IS = (object(), "wrong", [1.5], {}, 1j, b"1", -0.5)
ALLOWED = [("scale", -0.5), ("k_scale", -0.5), ("v_scale", -0.5)]


@pytest.mark.parametrize("function", [paged_attention, reference_attention])
def test_no_argument_takes_just_anything(function):
    """Arguments of a later version included: each has its check."""
    for name in inspect.signature(function).parameters:
        for wrong in NOTHING_IS:
            if (name, wrong) in ALLOWED:
                continue
            call = {k: v for k, v in good().items() if k != "out" or function is paged_attention}
            with pytest.raises(WRONG) as caught:
                function(**{**call, name: wrong})
            message = str(caught.value)
            assert name in message, message
            assert repr(wrong) in message or type(wrong).__name__ in message, message
            assert_same(call.get("out", sevens()), sevens(), "out")


def sevens():
    return torch.full((SEQS, HEADS, SIZE), 7.0)


def test_the_kinds_of_error_are_the_usual_ones():
    """float64 is a TypeError; a device, a shape or a value is a ValueError."""
    for fault, error in (
        ("query of float64", TypeError),
        ("query not a tensor", TypeError),
        ("block_tables on another device", ValueError),
        ("value_cache with fewer blocks", ValueError),
        ("query with another head size", ValueError),
        ("query with too few heads", ValueError),
        ("a live id of -1", ValueError),
        ("a negative length", ValueError),
        ("max_seq_len below the longest", ValueError),
        ("layout missing for a 4-D key", ValueError),
        ("backend unknown", ValueError),
        ("out the query itself", ValueError),
        ("softcap zero", ValueError),
        ("window zero", ValueError),
        ("bytes of no format", ValueError),
    ):
        call, words = with_fault(fault)
        refused(paged_attention, call, words, error)


@pytest.mark.parametrize("function", [paged_attention, reference_attention])
@in_each_layout
def test_memory_that_holds_no_token_is_refused_where_there_is_one(function, layout):
    """An empty pool, no columns, too few rows, a narrow table; with no token, all but the rows
    is as it should be."""
    call = good(layout)
    del call["out"]
    empty = {name: call[name][:0] for name in ("key_cache", "value_cache")}
    columns = {"block_tables": call["block_tables"][:, :0]}
    refused(function, {**call, **empty}, ("block_tables", "0"))
    refused(function, {**call, **columns}, ("block_tables", "0", "7"))
    refused(
        function,
        {**call, "block_tables": call["block_tables"][:, :1]},
        ("seq_lens[0]", "7", "block_tables", "1 columns"),
    )
    refused(function, {**call, "block_tables": call["block_tables"][:1]}, ("block_tables", "1"))
    none = {"seq_lens": torch.zeros(SEQS, dtype=torch.int32)}
    for nothing in (empty, columns, {**empty, **columns}):
        out = function(**{**call, **none, **nothing})
        out = out[0] if isinstance(out, tuple) else out
        assert (out == 0).all()


@pytest.mark.parametrize("function", [paged_attention, reference_attention])
@in_each_layout
def test_with_a_window_the_ids_that_it_reaches_must_be_right_and_no_others(function, layout):
    """Each sequence's own: 7 and 3 tokens in blocks of 4."""
    call = good(layout)
    del call["out"]
    bad = ids(call["block_tables"], ((0, 0), 2**31 - 1))
    for window, rows in ((3, 1), (1, 3), (2, 2)):
        query = call["query"].unsqueeze(1).expand(-1, rows, -1, -1)
        right = function(**{**call, "query": query, "window": window})
        dead = {**call, "query": query, "window": window, "block_tables": bad}
        for got, expected in zip(function(**dead), right):
            assert_same(got, expected)
        words = ("block_tables", "0", "2147483647", "6")
        refused(function, {**dead, "window": window + 1}, words)
    bad = ids(call["block_tables"], ((1, 0), -1))
    refused(function, {**call, "window": 1, "block_tables": bad}, ("block_tables", "1", "0", "-1"))


@in_each_layout
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_live_id_outside_the_pool_is_named_with_its_place(layout, dtype):
    """Sequence, column, id and pool size, wherever it stands; in padding it is nothing."""
    for seq, column, bad in ((0, 0, 6), (0, 1, -2), (1, 0, 99)):
        call = good(layout)
        call["block_tables"] = ids(call["block_tables"], ((seq, column), bad)).to(dtype)
        words = ("block_tables", str(seq), str(column), str(bad), "6")
        refused(paged_attention, call, words, ValueError)
    call = good(layout)
    right = paged_attention(**call).clone()
    call["block_tables"] = ids(call["block_tables"], ((0, 2), 6), ((1, 1), -99)).to(dtype)
    assert_same(paged_attention(**call), right)


@in_each_layout
def test_lengths_are_checked_against_their_own_row_and_max_seq_len(layout):
    call = good(layout)
    covers = call["block_tables"].shape[1] * BLOCK
    call["seq_lens"] = torch.tensor([covers + 1, 3])
    refused(paged_attention, call, ("seq_lens", "0", str(covers + 1), str(covers)))
    call = good(layout)
    call["block_tables"] = call["block_tables"][:, :0]
    refused(paged_attention, call, ("seq_lens", "0", "7"))
    for longest in (0, 1, 6):
        call = {**good(layout), "max_seq_len": longest}
        refused(paged_attention, call, ("max_seq_len", str(longest), "7"))


def test_layout_decides_the_rank_of_the_key_cache():
    for layout, words in (("HND", ("HND", "6, 2, 4, 4, 4")), ("NHD", ("NHD", "6, 2, 4, 4, 4"))):
        refused(paged_attention, {**good("vllm"), "layout": layout}, ("key_cache", *words))
    refused(paged_attention, {**good("NHD"), "layout": None}, ("layout", "HND", "NHD"))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: {"key_cache": c["key_cache"].reshape(6, 2, 2, 4, 8)}, ("key_cache", "8", "4")),
        (lambda c: {"key_cache": c["key_cache"].half()}, ("value_cache", "float16", "float32")),
        (
            lambda c: {"key_cache": c["key_cache"].half(), "value_cache": c["value_cache"].half()},
            ("key_cache", "4", "8"),
        ),
        (
            lambda c: {"value_cache": c["value_cache"].transpose(2, 3)},
            ("value_cache", "6, 2, 4, 16"),
        ),
        (lambda c: {"value_cache": c["value_cache"][:, :, :8]}, ("value_cache", "6, 2, 8, 4")),
        (lambda c: {"key_cache": c["key_cache"][:, :, :2]}, ("key_cache", "6, 2, 2, 4, 4")),
    ],
)
def test_the_vllm_layouts_shapes_must_fit_each_other_and_the_dtype(change, words):
    """x is 16 bytes' worth of lanes: 4 in float32, 8 in float16."""
    call = good("vllm")
    refused(paged_attention, {**call, **change(call)}, words)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    "scale", [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, 2.0])]
)
@in_each_layout
def test_a_scale_always_multiplies(name, scale, layout):
    dense = random([7, 3], HEADS, KV_HEADS, SIZE, seed=1)
    call = {**good(layout), name: scale}
    out = paged_attention(**call)
    factor = torch.as_tensor(scale).expand(KV_HEADS)[:, None]
    scaled = dense._replace(
        keys=[k * factor if name == "k_scale" else k for k in dense.keys],
        values=[v * factor if name == "v_scale" else v for v in dense.values],
    )
    assert (out - oracle(*scaled)[0]).abs().max() < 2e-6


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_of_one_is_taken_in_every_form(name):
    call = good()
    right = paged_attention(**call).clone()
    for one in (1, 1.0, torch.tensor(1.0), torch.ones(1), torch.ones(KV_HEADS)):
        assert_same(paged_attention(**{**call, name: one}), right)
