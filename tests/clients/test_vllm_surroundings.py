"""What surrounds a call of vLLM's operations changes no bit: default dtype and device,
deterministic mode, autocast, inference mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from conftest import FORWARD_DECODE, head_mapping
from helpers import assert_same
from pools import NAN, empty_caches, random
from vllm_calls import OPERATIONS, run, scratch_for, step

from paged_attention.vllm import register
from paged_attention.vllm.states import merge_attn_states
from paged_attention.vllm.writes import reshape_and_cache


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
}
in_each = pytest.mark.parametrize("surrounding", SURROUNDINGS)
each_cache = pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])


def written(kv_cache_dtype, surrounding=contextlib.nullcontext):
    """Caches of 3 blocks to which tokens were written, some of them skipped or repeated."""
    dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
    caches = empty_caches(3, 16, 2, 32, "vllm", dtype)
    for cache in caches:
        cache.zero_()
    dense = random([40], 6, 2, 32)
    slots = torch.arange(40) * 7 % 45
    slots[::5] = -1
    slots[33] = slots[4]
    scales = 0.5, torch.tensor([0.25, 2.0])
    with surrounding():
        reshape_and_cache(dense.keys[0], dense.values[0], *caches, slots, kv_cache_dtype, *scales)
    return caches


@in_each
@each_cache
def test_no_bit_of_what_is_written_changes(surrounding, kv_cache_dtype):
    ours = written(kv_cache_dtype, SURROUNDINGS[surrounding])
    for got, want in zip(ours, written(kv_cache_dtype)):
        assert_same(got, want)


@in_each
@each_cache
@pytest.mark.parametrize("version", OPERATIONS)
def test_no_bit_of_a_result_or_of_a_state_changes(version, kv_cache_dtype, surrounding):
    _, given = step([1030, 0, 17, 600], sharp=2.0)
    given["num_kv_heads"] = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    if kv_cache_dtype == "fp8":
        for name, lanes in (("key_cache", (2, 16, 16)), ("value_cache", (32, 16))):
            num_blocks = len(given[name])
            filling = torch.arange(num_blocks * 2 * 512).view(num_blocks, 2, *lanes)
            given[name] = (filling % 0x7F).to(torch.uint8)
        scales = {"k_scale": 0.01, "v_scale": torch.tensor([0.5, 2.0])}
        given |= {"kv_cache_dtype": "fp8", **scales}
    results = []
    for around in (contextlib.nullcontext, SURROUNDINGS[surrounding]):
        scratch, out = scratch_for(given["query"], 3), torch.full_like(given["query"], NAN)
        with around():
            run(version, given, scratch, out)
        results.append((out, *scratch))
    for got, want in zip(*results):
        assert_same(got, want)
    assert not results[0][0].isnan().any()


@in_each
def test_no_bit_of_a_merge_changes(surrounding):
    outs, lses = torch.randn(2, 5, 6, 32), torch.randn(2, 6, 5)
    merged = []
    for around in (contextlib.nullcontext, SURROUNDINGS[surrounding]):
        out, lse = torch.empty(5, 6, 32), torch.empty(6, 5)
        with around():
            merge_attn_states(out, outs[0], lses[0], outs[1], lses[1], lse)
        merged.append((out, lse))
    for got, want in zip(*merged):
        assert_same(got, want)


@in_each
@pytest.mark.parametrize("mode", ["force", "vendor"])
def test_no_bit_of_a_step_by_the_plugin_changes(tree, monkeypatch, mode, surrounding):
    vllm = tree("corex")
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "100")
    monkeypatch.setenv("PAGED_ATTENTION_VLLM", mode)
    register()
    dense, given = step([600, 3], sharp=2.0)
    given["num_kv_heads"] = head_mapping(dense)
    given = {name: given[name] for name in FORWARD_DECODE}
    outs = []
    for around in (contextlib.nullcontext, SURROUNDINGS[surrounding]):
        with around():
            outs.append(vllm.attention.forward_decode(*given.values()))
    assert_same(*outs)
