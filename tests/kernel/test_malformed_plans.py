"""What a plan can't be made of, and tensors that it was not made for: refused by name and value.

What a run refuses of any tensor, as `paged_attention` does, is in test_malformed.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from faults import HEADS, LENS, SIZES, good, refused, run_of, without
from pools import NAN

from paged_attention import plan_decode

pytestmark = pytest.mark.quick
OF_COUNTS = (*SIZES, "q_len", "window", "partition_size")
CAPACITY = {"seq_lens": None, "num_seqs": 2, "max_seq_len": 9}
FAULTS = [  # (the argument, what to put there, words)
    *((name, value, ()) for name in OF_COUNTS for value in (0, -1, 2.5, "3", True, NAN, [2])),
    *((name, None, ()) for name in (*SIZES, "layout", "q_len", "dtype")),
    ("num_heads", 5, ("2",)),
    *(("layout", value, ("HND",)) for value in ("hnd", 3)),
    *(("dtype", value, ()) for value in (torch.float64, torch.int8, "float32")),
    *(("backend", value, ()) for value in ("flash", 1)),
    ("seq_lens", None, ("num_seqs",)),
    *(("seq_lens", [3, value], ("seq_lens[1]",)) for value in (-1, 1.5, None, True)),
    *(("seq_lens", value, ()) for value in (3, "33")),
    *(("seq_lens", torch.tensor(value), (word,)) for value, word in (
        ([1.5], "float32"), ([[1]], "[1]"), (7, "7"), ([-2], "-2"))),
    ("seq_lens", torch.tensor([1], device="meta"), ("meta",)),
    ("num_seqs", 3, ("2",)),
    # OWN-06
    *(("num_seqs", value, ()) for value in (torch.tensor(2), 2.0, True, np.array([2]))),
    ("seq_lens", torch.tensor([5, 5]).to_sparse(), ("sparse",)),
    ("device", 2**70, ()), ("device", "nowhere", ()),
    ("dtype", np.array([1, 2]), ()),
    *(("max_seq_len", value, ()) for value in (6, "9")),
]  # fmt: skip


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in FAULTS))
def test_a_plan_that_cannot_be_made_is_refused_by_name_and_value(name):
    good = {**SIZES, "layout": "HND", "seq_lens": LENS}
    for _, value, words in (fault for fault in FAULTS if fault[0] == name):
        last = value[-1] if isinstance(value, list) and words else value
        shown = () if isinstance(value, torch.Tensor) else [repr(last)]
        refused(plan_decode, {**good, name: value}, name, words, shown)
    if name in ("num_seqs", "max_seq_len"):
        for value in (-1, 1.5, "2", True, None):
            refused(plan_decode, {**good, **CAPACITY, name: value}, name, shown=[repr(value)])


def test_the_vllm_layout_takes_head_sizes_of_whole_pieces():
    for size, dtype, lanes in ((18, torch.float32, "4"), (24, torch.uint8, "16")):
        call = {**SIZES, "layout": "vllm", "seq_lens": LENS, "head_size": size, "dtype": dtype}
        refused(plan_decode, call, "head_size", ("vllm", str(size), lanes))


def repeated(call):
    return {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in call.items()}


NOT_PLANNED = {  # what was planned, what is given, the argument, words
    "other heads": ({"num_heads": 2}, lambda c: {}, "query", ("4", "2")),
    "other KV heads": ({"num_kv_heads": 1}, lambda c: {}, "key_cache", ("2", "1")),
    "another head size": ({"head_size": 8}, lambda c: {}, "key_cache", ("16", "8")),
    "another block size": ({"block_size": 8}, lambda c: {}, "key_cache", ("4", "8")),
    "another layout": ({"layout": "vllm"}, lambda c: {}, "key_cache", ("vllm",)),
    "another dtype": ({"dtype": torch.float16}, lambda c: {}, "key_cache", ("float32", "float16")),
    "bytes": ({"dtype": torch.uint8}, lambda c: {}, "key_cache", ("float32", "uint8")),
    "another q_len": ({"q_len": 2}, lambda c: {}, "query", ("1", "2")),
    "rows": ({}, lambda c: {n: c[n].unsqueeze(1).repeat(1, 3, 1, 1) for n in ("query", "out")},
             "query", ("3", "1")),
    "more sequences": (
        {}, lambda c: repeated(without(c, "key_cache", "value_cache")), "query", ("4", "2")),
    "another device": ({}, lambda c: {n: x.to("meta") for n, x in c.items()},
                       "query", ("meta", "cpu")),
    "slopes, not causal": ({}, lambda c: {"alibi_slopes": torch.ones(HEADS), "causal": False},
                           "alibi_slopes", ("causal",)),
    "a window, not causal": ({"window": 3}, lambda c: {"causal": False}, "window", ("causal",)),
    "a wide one": ({"window": 300}, lambda c: {"causal": False}, "window", ("300", "causal")),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["exact", "capacity"])
@pytest.mark.parametrize("fault", NOT_PLANNED)
def test_a_run_on_what_was_not_planned_is_refused_by_name(kind, fault):
    planned, change, name, words = NOT_PLANNED[fault]
    call = without(good(), "layout")
    refused(run_of(kind, **planned), {**call, **change(call)}, name, words)


def test_an_exact_plan_needs_a_table_and_a_pool_that_can_hold_its_longest_sequence():
    call = without(good(), "layout")
    narrow = {"block_tables": call["block_tables"][:, :1]}
    refused(run_of("exact"), {**call, **narrow}, "block_tables", ("4", "7"))
    empty = {name: call[name][:0] for name in ("key_cache", "value_cache")}
    refused(run_of("exact"), {**call, **empty}, "block_tables", ("0 blocks",))
