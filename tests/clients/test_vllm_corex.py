"""The plugin in CoreX's port: what its V1 serves stays with it, what it doesn't is ours, and
nothing that it serves gets lost.

The port is there in four states: the vendor's own, whose V2 isn't implemented; one whose V2 is
broken; one that has PyTorch above what V1 serves; and one that has the vendor's V2 there.
"""

from __future__ import annotations

import functools
import sys
import threading

import pytest
import torch
from conftest import FORWARD_DECODE, head_mapping
from helpers import assert_close, oracle, rounding
from pools import Dense, random
from vllm_calls import step

import paged_attention.vllm as ours
from paged_attention.vllm import dispatch, plugin, register, unregister

VENDORS = ("corex",)
BROKEN = ("corex", "corex_broken_v2")
GATHER = ("corex", "corex_broken_v2", "corex_gather")
RENAMED = ("corex", "corex_broken_v2", "corex_renamed")
V1_SERVES = 32768  # tokens
KERNEL = "vllm_single_query_cached_kv_attention_v2"


@functools.cache
def long_step(tokens):
    """(dense, arguments, attention) of one sequence as on the card: 6 heads on 1 of 256, fp16."""
    dense, given = step([tokens], 6, 1, 256, sharp=2.0, dtype=torch.float16)
    given["num_kv_heads"] = head_mapping(dense)
    return dense, {name: given[name] for name in FORWARD_DECODE}, oracle(*dense)[0]


def calls():
    """What was asked of the vendor's kernels since the last time."""
    seen = sys.modules["ixformer.functions"].CALLS
    found, seen[:] = list(seen), []
    return found


def corex_arguments(lens, **changed):
    dense, given = step(lens, sharp=2.0)
    given["num_kv_heads"] = head_mapping(dense)
    return dense, {name: given[name] for name in FORWARD_DECODE} | changed


# -- the port's states


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("tokens", [1000, 9000, 33000])
@pytest.mark.parametrize("state", [VENDORS, BROKEN, GATHER, RENAMED], ids="-".join)
def test_every_state_of_the_port_serves_what_it_did_and_long_sequences_too(
    tree, logged, state, tokens, is_on
):
    vllm = tree(*state)
    if is_on:
        register()
        assert [level for level, _ in logged()] == ["INFO"]
    dense, given, right = long_step(tokens)
    for _ in range(2):
        if tokens > V1_SERVES and state in (VENDORS, BROKEN) and not is_on:
            with pytest.raises(RuntimeError, match="no shared memory"):
                vllm.attention.forward_decode(*given.values())
            continue
        out = vllm.attention.forward_decode(*given.values())
        assert_close(out, right, extra=rounding(dense))
        if tokens <= V1_SERVES:
            assert calls() == ["v1"]
        else:
            assert calls() == ([("v2", len(given["key_cache"]))] if state == RENAMED else [])
    assert getattr(vllm.ops, "V2_CALLS", []) == []  # nobody knows what a V2 does that isn't called
    assert logged() == []
    own = vars(vllm.attention)["forward_decode"] is vllm.before["forward_decode"]
    assert own == (not is_on or state in (GATHER, RENAMED))
    unregister()
    assert vllm.unchanged()


def test_the_log_says_what_is_changed_and_what_is_unused(tree, logged):
    tree(*VENDORS)
    register()
    [(level, said)] = logged()
    assert level == "INFO"
    assert "above 32768 tokens V2 serves, and up to there the port" in said
    assert f"{KERNEL} stays unused without PAGED_ATTENTION_VLLM=vendor" in said


def test_the_port_keeps_what_max_seq_len_says_that_v1_serves(tree, monkeypatch):
    """vLLM knows max_seq_len on the host, so nothing is read back."""
    vllm = tree(*VENDORS)
    register()
    _, given = corex_arguments([40, 7])
    for max_seq_len, by in ((V1_SERVES, ["v1"]), (V1_SERVES + 1, [])):
        vllm.attention.forward_decode(*(given | {"max_seq_len": max_seq_len}).values())
        assert calls() == by
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    for max_seq_len, by in ((100, ["v1"]), (101, [])):
        vllm.attention.forward_decode(*(given | {"max_seq_len": max_seq_len}).values())
        assert calls() == by


def test_v2_called_by_somebody_else_is_ours_after_its_first_call(tree):
    vllm = tree(*VENDORS)
    register()
    dense, given = step([600], sharp=2.0)
    given["num_kv_heads"] = head_mapping(dense)
    for _ in range(2):
        out = torch.empty_like(dense.query)
        vllm.ops.paged_attention_v2(out, *dispatch.scratch(dense.query, 600), *given.values())
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    assert len(vllm.ops.COMPLAINTS) == 1
    assert vllm.ops.paged_attention_v2 is ours.paged_attention_v2


def chooses(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    max_seq_len,
    kv_cache_dtype,
    num_kv_heads,
    scale,
    alibi_slopes,
    k_scale,
    v_scale,
):
    from vllm import _custom_ops as ops

    out, block_size = torch.empty_like(query), value_cache.shape[3]
    rest = query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size
    if max_seq_len <= 512:
        ops.paged_attention_v1(out, *rest, max_seq_len, alibi_slopes)
    else:
        scratch = dispatch.scratch(query, max_seq_len)
        more = max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale
        ops.paged_attention_v2(out, *scratch, *rest, *more)
    return out


def test_a_port_that_calls_its_missing_v2_gets_ours_and_calls_v1_itself(tree):
    vllm = tree(*VENDORS)
    vllm.replace(vllm.attention, "forward_decode", staticmethod(chooses))
    register()
    for lens, by in (([40, 7], ["v1"]), ([600, 7], []), ([40, 7], ["v1"]), ([600, 7], [])):
        vllm.assert_ours(lens)
        assert calls() == by
    assert len(vllm.ops.COMPLAINTS) == 1
    _, given = corex_arguments([40])
    vllm.attention.forward_decode(*(given | {"max_seq_len": V1_SERVES + 1}).values())
    assert calls() == []
    unregister()
    assert vllm.unchanged()


@pytest.mark.parametrize("mode", ["force", "vendor"])
@pytest.mark.parametrize("state", [GATHER, RENAMED], ids="-".join)
def test_who_asks_for_another_v2_gets_it_from_a_port_that_has_its_own(
    tree, monkeypatch, state, mode
):
    vllm = tree(*state)
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", mode)
    register()
    for tokens in (1000, 33000):
        dense, given, right = long_step(tokens)
        out = vllm.attention.forward_decode(*given.values())
        assert_close(out, right, extra=rounding(dense))
        long = [("v2", -(-tokens // 16))] if mode == "vendor" else []
        assert calls() == (["v1"] if tokens <= V1_SERVES else long)
    unregister()
    assert vllm.unchanged()


def test_while_a_graph_is_captured_the_port_serves_itself(tree, logged, monkeypatch):
    vllm = tree(*VENDORS)
    register()
    logged()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    _, given = corex_arguments([40])
    with pytest.raises(RuntimeError, match="no shared memory"):
        vllm.attention.forward_decode(*(given | {"max_seq_len": V1_SERVES + 1}).values())
    assert calls() == ["v1"] and logged() == []
    assert not vllm.unchanged()


# -- head_mapping


def renamed(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    max_seq_len,
    kv_cache_dtype,
    head_mapping,
    scale,
    alibi_slopes,
    k_scale,
    v_scale,
):
    from vllm import _custom_ops as ops

    out = torch.empty_like(query)
    rest = head_mapping, scale, block_tables, seq_lens, value_cache.shape[3], max_seq_len
    ops.paged_attention_v1(out, query, key_cache, value_cache, *rest, alibi_slopes)
    return out


@pytest.mark.parametrize("is_renamed", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_head_mapping_is_served_by_position_and_by_either_name(
    tree, monkeypatch, is_renamed, by_keyword
):
    vllm = tree(*VENDORS)
    if is_renamed:
        vllm.replace(vllm.attention, "forward_decode", staticmethod(renamed))
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    for lens, by in (([60, 3], ["v1"]), ([600, 3], [])):
        dense, given = corex_arguments(lens)
        if is_renamed:
            given["head_mapping"] = given.pop("num_kv_heads")
            given = {name: given[name] for name in renamed.__code__.co_varnames[:12]}
        args, kwargs = ((), given) if by_keyword else (given.values(), {})
        out = vllm.attention.forward_decode(*args, **kwargs)
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))
        assert calls() == by


@pytest.mark.parametrize("lens", [[60], [600]])
def test_a_call_that_the_port_refuses_is_refused_by_the_port(tree, monkeypatch, lens):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    _, given = corex_arguments(lens)
    for args, kwargs in (
        ([*given.values()][:-1], {}),
        ([*given.values()], {"head_mapping": None}),
        ([*given.values()] + [0] * 6, {}),
    ):
        with pytest.raises(TypeError, match=r"forward_decode\(\)"):
            vllm.attention.forward_decode(*args, **kwargs)
    assert not calls() and not vllm.unchanged()


def test_an_unusual_head_mapping_is_named_and_goes_to_the_port(tree, logged, monkeypatch):
    """Its V1 serves any mapping, and ours doesn't."""
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    logged()
    mapping = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32)
    dense, given = corex_arguments([600, 5], num_kv_heads=mapping)
    out = vllm.attention.forward_decode(*given.values())
    regrouped = dense._replace(
        keys=[key[:, mapping] for key in dense.keys],
        values=[value[:, mapping] for value in dense.values],
    )
    assert_close(out, oracle(*regrouped)[0], extra=rounding(regrouped))
    [(level, said)] = logged()
    assert level == "WARNING" and "num_kv_heads[1] in a head_mapping must be 0" in said
    assert calls() == ["v1"]


# -- whatever V2 does, the port serves at least what it did


def fail(times, error):
    """A V2 that raises in these of its calls, counted from 0."""
    seen = []

    def v2(*args):
        seen.append(len(args))
        if len(seen) - 1 in times:
            args[0].fill_(torch.nan)
            raise error
        ours.paged_attention_v2(*args)

    return v2


ERRORS = [
    RuntimeError("ZeroDivisionError"),
    NotImplementedError("Not implemented or built"),
    torch.cuda.OutOfMemoryError("out of memory"),
    AssertionError(),
    ValueError("block_tables"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("mode", ["", "vendor"])
def test_a_v2_that_fails_in_its_first_step_leaves_the_port_as_it_was(
    tree, logged, monkeypatch, error, mode
):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", mode)
    v2 = fail({0}, error)
    if mode == "vendor":
        monkeypatch.setattr(sys.modules["ixformer.functions"], KERNEL, v2)
    else:
        monkeypatch.setattr(plugin, "paged_attention_v2", v2)
    register()
    held = vllm.attention.forward_decode  # by one who had looked it up before
    assert [level for level, _ in logged()] == ["INFO"]
    for decode in (held, vllm.attention.forward_decode, held):
        dense, given = corex_arguments([600, 3])
        out = decode(*given.values())
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))
        assert calls() == ["v1"]
        assert vars(vllm.attention)["forward_decode"] is vllm.before["forward_decode"]
    [(level, said)] = logged()
    assert level == "WARNING" and type(error).__name__ in said and str(error) in said
    register()
    assert logged() == []  # twice is once
    unregister()
    assert vllm.unchanged()


def test_a_v2_that_fails_later_goes_on_after_a_step_that_the_port_serves(
    tree, logged, monkeypatch
):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    monkeypatch.setattr(plugin, "paged_attention_v2", fail({1, 3}, RuntimeError("no memory")))
    register()
    logged()
    for by in ([], ["v1"], [], ["v1"], []):
        vllm.assert_ours([600, 3])
        assert calls() == by
    [(level, said)] = logged()  # one warning for both
    assert level == "WARNING" and "no memory" in said


@pytest.mark.parametrize("failing", [(), (0,), (0, 1)])
def test_two_threads_first_steps_are_served(tree, logged, monkeypatch, failing):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    both_in, seen, results = threading.Barrier(2, timeout=30), [], []

    def v2(*args):
        seen.append(1)
        number = len(seen) - 1
        if number < 2:
            both_in.wait()
        if number in failing:
            raise RuntimeError("no kernel")
        ours.paged_attention_v2(*args)

    monkeypatch.setattr(plugin, "paged_attention_v2", v2)
    register()
    logged()
    dense, given = corex_arguments([600, 3])
    decode = vllm.attention.forward_decode
    threads = [
        threading.Thread(target=lambda: results.append(decode(*given.values()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in (*results, decode(*given.values())):
        assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    assert len(results) == 2
    assert [level for level, _ in logged()] == ["WARNING"] * bool(failing)
    unregister()
    assert vllm.unchanged()


# -- what V1 would serve wrongly


@pytest.mark.parametrize("tokens", [40, 40_000])
def test_fp8_caches_are_written_and_read_by_ours(tree, tokens):
    """CoreX's V1 and its cache writes are given neither the format nor the scales."""
    vllm = tree(*VENDORS)
    register()
    dense = random([tokens if tokens < 100 else 300], 6, 2, 32, sharp=2.0)
    cache = torch.full((20, 2, 2, 16, 16), 0x7F, dtype=torch.uint8)
    caches = cache, torch.full((20, 2, 32, 16), 0x7F, dtype=torch.uint8)
    key, value = dense.keys[0], dense.values[0]
    table = torch.randperm(20)[None].int()
    t = torch.arange(len(key))
    slots = table[0, t // 16] * 16 + t % 16
    vllm.ops.reshape_and_cache(key, value, *caches, slots, "fp8", 0.5, 0.25)
    lens = torch.tensor([len(key)], dtype=torch.int32)
    max_seq_len = tokens if tokens > 100 else len(key)
    rest = table, lens, max_seq_len, "fp8", head_mapping(dense), 0.2, None, 0.5, 0.25
    out = vllm.attention.forward_decode(dense.query, *caches, *rest)
    key = (key / 0.5).to(torch.float8_e4m3fn).float() * 0.5
    value = (value / 0.25).to(torch.float8_e4m3fn).float() * 0.25
    stored = Dense(dense.query, [key], [value])
    assert_close(out, oracle(*stored, scale=0.2)[0], extra=rounding(stored, 0.2))
    assert not calls()
    vllm.ops.reshape_and_cache(key, value, key, value, slots, "auto", 1.0, 1.0)
    assert calls() == ["reshape_and_cache"]
    unregister()
    assert vllm.unchanged()


@pytest.mark.parametrize("lens", [[40], [600]])
def test_what_neither_v1_nor_ours_serves_is_an_error_by_name(tree, logged, monkeypatch, lens):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    logged()
    _, given = corex_arguments(lens)
    with pytest.raises(ValueError, match="blocksparse_vert_stride must be 0.* got 8"):
        vllm.attention.forward_decode(*given.values(), 0, 16, 8)
    for name, caches in (("kv_cache_dtype", ("key_cache", "value_cache")), ("query", ("query",))):
        wrong = {cache: given[cache].to(torch.uint8) for cache in caches}
        if name == "query":
            wrong |= {n: given[n].to(torch.uint8) for n in ("key_cache", "value_cache")}
        with pytest.raises((TypeError, ValueError), match=name):
            vllm.attention.forward_decode(*(given | wrong).values())
    assert not calls() and not vllm.unchanged() and logged() == []
    vllm.assert_ours(lens)  # and V2 isn't given up


# -- the vendor's V2


@pytest.fixture
def vendor_is_asked_for(monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", "vendor")


def test_the_vendors_v2_serves_long_sequences_from_their_own_blocks(
    tree, logged, vendor_is_asked_for
):
    vllm = tree(*VENDORS)
    register()
    [(level, said)] = logged()
    assert level == "INFO" and "the vendor's, because of PAGED_ATTENTION_VLLM=vendor" in said
    for tokens, by in ((1000, ["v1"]), (33000, [("v2", -(-33000 // 16))])):
        dense, given, right = long_step(tokens)
        assert len(given["key_cache"]) > -(-tokens // 16)
        out = vllm.attention.forward_decode(*given.values())
        assert_close(out, right, extra=rounding(dense))
        assert calls() == by
    unregister()
    assert vllm.unchanged()


def test_the_vendors_v2_serves_ragged_batches_and_follows_no_garbage(
    tree, monkeypatch, vendor_is_asked_for
):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    vllm.assert_ours([600, 3, 0, 90])
    assert calls() == [("v2", 4 * -(-600 // 16))]
    _, given = corex_arguments([40, 7], max_seq_len=9999)  # the model's, as a port may pass
    vllm.attention.forward_decode(*given.values())
    assert calls() == [("v2", 2 * given["block_tables"].shape[1])]


@pytest.mark.parametrize("form", ["number", "tensor"])
def test_the_vendors_v2_is_called_as_vllms(tree, vendor_is_asked_for, form):
    vllm = tree(*VENDORS)
    register()
    dense, given = step([600, 40], sharp=2.0)
    if form == "tensor":
        given["num_kv_heads"] = head_mapping(dense)
    scratch = dispatch.scratch(dense.query, 600)._asdict()
    out = torch.empty_like(dense.query)
    vllm.ops.paged_attention_v2(out=out, **scratch, **given)
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    assert calls() == [("v2", 2 * -(-600 // 16))]


def test_what_the_vendors_v2_has_no_argument_for_is_ours(tree, monkeypatch, vendor_is_asked_for):
    vllm = tree(*VENDORS)
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    register()
    slopes = torch.linspace(-0.01, 0.02, 6)
    dense, given = corex_arguments([600, 3], alibi_slopes=slopes)
    out = vllm.attention.forward_decode(*given.values())
    assert_close(out, oracle(*dense, slopes=slopes)[0], extra=rounding(dense, slopes=slopes))
    half = dense.query.half()
    out = vllm.attention.forward_decode(*(given | {"query": half, "alibi_slopes": None}).values())
    assert_close(out, oracle(half, *dense[1:])[0], extra=rounding(dense))
    assert not calls()


@pytest.mark.parametrize("gone", ["kernel", "module"])
def test_without_the_vendors_v2_nothing_is_changed(
    tree, logged, monkeypatch, vendor_is_asked_for, gone
):
    vllm = tree(*VENDORS)
    if gone == "kernel":
        monkeypatch.delattr(sys.modules["ixformer.functions"], KERNEL)
    else:
        monkeypatch.setitem(sys.modules, "ixformer.functions", None)
    register()
    [(level, said)] = logged()
    assert level == "WARNING" and "changes nothing" in said
    assert f"PAGED_ATTENTION_VLLM=vendor needs ixformer.functions.{KERNEL}" in said
    assert vllm.unchanged()
