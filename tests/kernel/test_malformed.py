"""Every argument with every fault it can have: refused by name and value, before anything moves.

`paged_attention`, a plan's run and the reference refuse the same faults, which are data in
`tests/support/faults.py`. `out`, the caches and the metadata stay as they were.
"""

from __future__ import annotations

import inspect

import faults
import pytest
import torch
from faults import HEADS, KINDS, KV_HEADS, SEQS, WRONG, good, ids, refused, run_of, signs, without
from helpers import assert_same, in_each_layout, on_each_device
from pools import INF, LAYOUTS, NAN

from paged_attention import paged_attention, reference_attention

pytestmark = pytest.mark.quick

WITHOUT_VALUES = faults.INPUTS + faults.LOGITS + faults.FORMATS
OF_A_CALL = faults.WINDOWS + faults.LAYOUTS
VALUES = faults.IDS + faults.LOGIT_VALUES
ENTRIES = {  # (the function, what of the good call it doesn't take, what it refuses)
    "paged_attention": (
        paged_attention,
        (),
        WITHOUT_VALUES + OF_A_CALL + VALUES + faults.LENGTH_VALUES
        + faults.OUTS + faults.SWITCHES + faults.FLAGS,
    ),
    "paged_attention, values unchecked": (
        lambda **call: paged_attention(**call, validate=False),
        (),
        WITHOUT_VALUES + OF_A_CALL + faults.LENGTH_VALUES + faults.OUTS + faults.SWITCHES,
    ),
    "the reference": (
        reference_attention,
        ("out",),
        WITHOUT_VALUES + OF_A_CALL + VALUES + faults.LENGTH_VALUES,
    ),
    **{kind: (run_of(kind), ("layout",), WITHOUT_VALUES + faults.OUTS) for kind in KINDS},
}  # fmt: skip


def test_the_calls_that_the_faults_are_put_into_work():
    for layout in LAYOUTS:
        call = good(layout)
        right, _ = reference_attention(**without(call, "out"))
        for run in (paged_attention, *(run_of(kind, layout) for kind in KINDS)):
            given = call if run is paged_attention else without(call, "layout")
            assert_same(run(**given), call["out"])
            assert (call["out"] - right).abs().max() < 2e-6


@pytest.mark.parametrize(
    "entry, name",
    [(e, n) for e, (*_, some) in ENTRIES.items() for n in dict.fromkeys(f.name for f in some)],
)
def test_a_fault_is_refused_by_name_and_value_and_nothing_moves(entry, name):
    function, not_taken, some = ENTRIES[entry]
    for _, change, words in (fault for fault in some if fault.name == name):
        call = without({**faults.GOOD, **change}, *not_taken)
        refused(function, call, name, words, () if words else signs(name, change[name]))


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e != "paged_attention, values unchecked"])
def test_no_argument_takes_just_anything(entry):
    """Arguments of a later version included: each has its check."""
    function, not_taken, _ = ENTRIES[entry]
    for name in inspect.signature(function).parameters:
        for wrong in (object(), "wrong", [1.5], {}, 1j, b"1", -0.5):
            if wrong != -0.5 or name not in ("scale", "k_scale", "v_scale"):
                call = without({**good(), name: wrong}, *not_taken)
                with pytest.raises(WRONG, match=name) as caught:
                    function(**call)
                assert repr(wrong) in str(caught.value) or type(wrong).__name__ in str(
                    caught.value
                )
                assert name == "out" or (call.get("out", torch.tensor(7.0)) == 7.0).all()


def test_the_kinds_of_error_are_the_usual_ones():
    """A wrong type or dtype is a TypeError; a device, a shape or a value is a ValueError."""
    query = good()["query"]
    for name, wrong, error in (
        ("query", query.double(), TypeError),
        ("query", [1.0], TypeError),
        ("query", query[:, :3], ValueError),
        ("query", query[..., :8], ValueError),
        ("block_tables", good()["block_tables"].to("meta"), ValueError),
        ("block_tables", ids(good()["block_tables"], (0, 1), -1), ValueError),
        ("seq_lens", torch.tensor([7, -3]), ValueError),
        ("max_seq_len", 6, ValueError),
        ("layout", None, ValueError),
        ("backend", "flash", ValueError),
        ("softcap", 0.0, ValueError),
        ("window", 0, ValueError),
        ("return_lse", "no", TypeError),
    ):
        refused(paged_attention, {**good(), name: wrong}, name, error=error)


@pytest.mark.parametrize("function", [paged_attention, reference_attention])
@in_each_layout
def test_memory_that_holds_no_token_is_refused_where_there_is_one(function, layout):
    """An empty pool, no columns, too narrow a table. Without a token they are as they must be."""
    call = without(good(layout), "out")
    empty = {name: call[name][:0] for name in ("key_cache", "value_cache")}
    columns = {"block_tables": call["block_tables"][:, :0]}
    narrow = {"block_tables": call["block_tables"][:, :1]}
    for change, words in (
        (empty, ("0 blocks",)),
        (columns, ("0", "7")),
        (narrow, ("seq_lens[0]", "7", "1 columns")),
    ):
        refused(function, {**call, **change}, "block_tables", words)
        none = {"seq_lens": torch.zeros(SEQS, dtype=torch.int32)}
    for nothing in (empty, columns, {**empty, **columns}):
        out = function(**{**call, **none, **nothing})
        assert ((out[0] if isinstance(out, tuple) else out) == 0).all()


@pytest.mark.parametrize("function", [paged_attention, reference_attention])
@in_each_layout
def test_with_a_window_the_ids_that_it_reaches_must_be_right_and_no_others(function, layout):
    """Each sequence's own: 7 and 3 tokens in blocks of 4."""
    call = without(good(layout), "out")
    bad = ids(call["block_tables"], (0, 0), 2**31 - 1)
    for window, rows in ((3, 1), (1, 3), (2, 2)):
        query = call["query"].unsqueeze(1).expand(-1, rows, -1, -1)
        right = function(**{**call, "query": query, "window": window})
        dead = {**call, "query": query, "window": window, "block_tables": bad}
        for got, expected in zip(function(**dead), right):
            assert_same(got, expected)
        with pytest.raises(ValueError, match=r"block_tables\[0\]\[0\] is block 2147483647"):
            function(**{**dead, "window": window + 1})
    bad = ids(call["block_tables"], (1, 0), -1)
    with pytest.raises(ValueError, match=r"block_tables\[1\]\[0\] is block -1"):
        function(**{**call, "window": 1, "block_tables": bad})


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("key_cache", lambda k, v: (k.reshape(6, 2, 2, 4, 8), v), ("8", "4")),
        ("value_cache", lambda k, v: (k.half(), v), ("float16", "float32")),
        ("key_cache", lambda k, v: (k.half(), v.half()), ("4", "8")),
        ("value_cache", lambda k, v: (k, v.transpose(2, 3)), ("6, 2, 4, 16",)),
        ("value_cache", lambda k, v: (k, v[:, :, :8]), ("6, 2, 8, 4",)),
        ("key_cache", lambda k, v: (k[:, :, :2], v), ("6, 2, 2, 4, 4",)),
    ],
)
def test_the_vllm_layouts_shapes_must_fit_each_other_and_the_dtype(name, change, words):
    """x is 16 bytes' worth of lanes: 4 in float32, 8 in float16."""
    call = good("vllm")
    key, value = change(call["key_cache"], call["value_cache"])
    refused(paged_attention, {**call, "key_cache": key, "value_cache": value}, name, words)
    refused(paged_attention, {**call, "layout": "NHD"}, "key_cache", ("NHD", "6, 2, 4, 4, 4"))


@in_each_layout
@pytest.mark.parametrize("bad", [6, -1, 2**31 - 1, -(2**31)])
def test_without_validation_a_bad_live_id_still_gives_no_number_on_a_cpu(layout, bad):
    """We don't check it then, but it is neither clamped nor wrapped into another's block."""
    call = {**good(layout), "validate": False}
    call["block_tables"] = ids(call["block_tables"], (0, 1), bad)
    with pytest.raises((IndexError, *WRONG)):
        paged_attention(**call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_run_that_reads_no_value_hides_none(kind, bad):
    """NaN in a slope, a sink or a scale is NaN in what it touches, and in nothing else."""
    for name, n in (("alibi_slopes", HEADS), ("sinks", HEADS), ("v_scale", KV_HEADS)):
        value = torch.tensor([0.5] * (n - 1) + [bad])
        out = run_of(kind)(**without(good(), "layout"), **{name: value})
        touched = HEADS // n
        assert not out[:, -touched:].isfinite().all(), name
        assert out[:, :-touched].isfinite().all(), name


@on_each_device
def test_lengths_on_the_host_beside_a_cache_elsewhere_are_fine(device):
    call = good(device=device)
    right = paged_attention(**call).clone()
    assert_same(paged_attention(**{**call, "seq_lens": call["seq_lens"].cpu()}), right)


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="blocksize"):
        paged_attention(**good(), blocksize=16)
    with pytest.raises(TypeError):
        paged_attention(*list(good().values())[:5], "HND")
    for name in ("window", "layout", "partition_size", "max_seq_len", "validate"):
        with pytest.raises(TypeError, match=name):
            run_of("exact")(**without(good(), "layout"), **{name: 3})
