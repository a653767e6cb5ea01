"""reshape_and_cache writes tokens to their slots and nothing else, and fp8 as bytes by a scale."""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import DTYPES, assert_close, assert_same, oracle, rounding
from pools import INF, NAN, empty_caches, paged, random, store
from vllm_calls import BAD_SCALES, arguments, run

from paged_attention.vllm.writes import reshape_and_cache


def caches(num_blocks, block_size, heads, head_size, dtype=torch.float32, fill=NAN):
    key, value = empty_caches(num_blocks, block_size, heads, head_size, "vllm", dtype)
    return key.fill_(fill), value.fill_(fill)


def values_in(value_cache, tokens):
    """The first block's values, (tokens, num_kv_heads, head_size)."""
    return value_cache[0].permute(2, 0, 1)[:tokens].contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_land_in_their_slots_and_nothing_else_changes(dtype):
    dense = random([37], 1, 3, 24, dtype=dtype)
    ours, wanted = caches(7, 16, 3, 24, dtype), caches(7, 16, 3, 24, dtype)
    table, order = [5, 0, 2], torch.randperm(37)
    slots = torch.tensor(table)[order // 16] * 16 + order % 16
    packed = torch.stack([dense.keys[0][order], dense.values[0][order]], dim=1)
    reshape_and_cache(*packed.unbind(1), *ours, slots, "auto", torch.tensor(9.0), 9.0)
    store(*wanted, "vllm", 16, table, dense.keys[0], dense.values[0])
    for got, want in zip(ours, wanted):
        assert_same(got, want)


@pytest.mark.parametrize("fill", [NAN, 3.0])
@pytest.mark.parametrize(
    "mapping", [[-1, 20, -1, 3], [-1, -1, -1, -1], [0, 1, 2, -7], [], [0, 1, 2]]
)
def test_negative_slots_are_skipped_and_tokens_without_a_slot_are_padding(mapping, fill):
    dense = random([4], 1, 2, 8)
    ours, wanted = (caches(2, 16, 2, 8, fill=fill) for _ in range(2))
    for token, slot in enumerate(mapping):
        if slot >= 0:
            block, offset = divmod(slot, 16)
            wanted[0][block, :, :, offset] = dense.keys[0][token].view(2, 2, 4)
            wanted[1][block, :, :, offset] = dense.values[0][token]
    slots = torch.tensor(mapping, dtype=torch.int32)
    reshape_and_cache(dense.keys[0], dense.values[0], *ours, slots, "auto", 1.0, 1.0)
    for got, want in zip(ours, wanted):
        assert_same(got, want)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_fp8_is_divided_by_the_scale_rounded_and_saturated(name):
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    largest = torch.finfo(dtype).max
    key = torch.tensor([[1.0, 300.0, -1e30, 2.0], [0.0, INF, -0.0, 1e-30]]).repeat(1, 4)[:, None]
    value = key.flip(0)
    ours = caches(1, 2, 1, 16, torch.uint8, 0)
    reshape_and_cache(key, value, *ours, torch.tensor([0, 1]), name, 0.5, torch.tensor(0.25))
    got_key = ours[0][0, 0].permute(1, 0, 2).reshape(2, 1, 16)
    for got, given, scale in ((got_key, key, 0.5), (values_in(ours[1], 2), value, 0.25)):
        want = (given / scale).clamp(-largest, largest)
        assert torch.equal(got.view(dtype).float(), want.to(dtype).float())
        assert got.view(dtype).float().abs().max() == largest


def test_fp8_may_have_a_scale_for_each_kv_head():
    dense, scales = random([5], 1, 2, 16), torch.tensor([0.5, 4.0])
    ours = caches(1, 16, 2, 16, torch.uint8, 0)
    tokens = dense.keys[0], dense.values[0]
    reshape_and_cache(*tokens, *ours, torch.arange(5), "fp8", scales, scales)
    want = (dense.values[0] / scales[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(values_in(ours[1], 5), want.view(torch.uint8))


def test_what_is_written_is_what_the_kernel_reads():
    dense = random([70, 5], 4, 2, 32, sharp=3.0, dtype=torch.float16)
    pool = paged(dense, 16, "vllm")
    pool.key_cache.fill_(NAN), pool.value_cache.fill_(NAN)
    for row, key, value in zip(pool.block_tables, dense.keys, dense.values):
        t = torch.arange(len(key))
        slots = row[t // 16].long() * 16 + t % 16
        reshape_and_cache(key, value, pool.key_cache, pool.value_cache, slots, "auto", 1.0, 1.0)
    out = run("v2", arguments(dense, pool))
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))


@pytest.mark.parametrize("count", [9, 4000])
def test_of_several_tokens_for_one_slot_the_last_one_stays_among_skipped_ones_too(count):
    """As if each token were written by a call of its own."""
    rng = torch.Generator().manual_seed(1)
    slots = torch.randint(-3, 5, (count,), generator=rng)
    dense = random([count], 1, 2, 8)
    ours, wanted = (caches(2, 4, 2, 8) for _ in range(2))
    reshape_and_cache(dense.keys[0], dense.values[0], *ours, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            alone = slice(token, token + 1)
            where = slots[alone]
            reshape_and_cache(dense.keys[0][alone], dense.values[0][alone], *wanted, where)
    for got, want in zip(ours, wanted):
        assert_same(got, want)


def test_a_skipped_token_after_a_repeated_slot_does_not_bring_the_first_one_back():
    tokens = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 1, 8)
    ours = caches(1, 2, 1, 8, fill=0)
    reshape_and_cache(tokens, tokens, *ours, torch.tensor([1, 1, -1]))
    assert ours[1][0, 0, 0].tolist() == [0, 2]


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", BAD_SCALES, ids=str)
def test_pub_31_an_fp8_scale_of_0_nan_or_infinity_is_refused_and_nothing_written(name, scale):
    ours, key = caches(1, 2, 2, 16, torch.uint8, 7), torch.tensor([1.0, 0.0]).repeat(16)
    scales = {"k_scale": 1.0, "v_scale": 1.0} | {name: scale}
    key = key.view(1, 2, 16)
    with pytest.raises(ValueError, match=f"{name} must be finite in float32, and not 0"):
        reshape_and_cache(key, key, *ours, torch.tensor([0]), "fp8", **scales)
    assert all(cache.eq(7).all() for cache in ours)


def test_writing_reads_nothing_back_from_a_device():
    key = torch.empty(4, 2, 8, device="meta")
    cache = torch.empty(3, 2, 2, 16, 4, device="meta"), torch.empty(3, 2, 8, 16, device="meta")
    slots = torch.empty(4, dtype=torch.int64, device="meta")
    reshape_and_cache(key, key, *cache, slots, "auto", 1.0, 1.0)
    fp8 = [torch.empty(3, 2, 1, 16, 16, dtype=torch.uint8, device="meta")]
    fp8.append(torch.empty(3, 2, 16, 16, dtype=torch.uint8, device="meta"))
    key, scale = torch.empty(4, 2, 16, device="meta"), torch.empty(2, device="meta")
    reshape_and_cache(key, key, *fp8, slots, "fp8", scale, scale)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"slot_mapping": torch.tensor([0, 32])}, "slot_mapping must be below 32, .*got 32"),
        ({"slot_mapping": torch.zeros(2)}, "slot_mapping must be int32 or int64"),
        ({"slot_mapping": torch.arange(6)}, "slot_mapping must be .*5 tokens"),
        ({"slot_mapping": torch.zeros(1, 2, dtype=torch.int64)}, "slot_mapping must be"),
        ({"key": torch.zeros(5, 3, 16)}, "key must be"),
        ({"value": torch.zeros(4, 2, 16)}, "value must be"),
        ({"value": torch.zeros(5, 2, 16, dtype=torch.int32)}, "value must be floating"),
        ({"key": [1.0]}, "key must be a tensor"),
        ({"kv_cache_dtype": "fp8"}, "key_cache must be torch.uint8"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of"),
        ({"v_scale": 0}, r"v_scale.*before 0\.5\.3"),
        ({"v_scale": None}, r"v_scale.*before 0\.5\.3"),
        ({"v_scale": torch.ones(3), "kv_cache_dtype": "fp8"}, "v_scale must .*one per KV head"),
        ({"v_scale": "1", "kv_cache_dtype": "fp8"}, "v_scale must .*a number"),
    ],
)
def test_a_wrong_write_is_an_error_by_name_and_writes_nothing(changed, words):
    wrong_scale = len(changed) == 2
    fill = 7 if wrong_scale else NAN
    cache = caches(2, 16, 2, 16, torch.uint8 if wrong_scale else torch.float32, fill)
    given = {
        "key": torch.zeros(5, 2, 16),
        "value": torch.zeros(5, 2, 16),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "slot_mapping": torch.arange(5),
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    assert list(inspect.signature(reshape_and_cache).parameters) == list(given)
    with pytest.raises((TypeError, ValueError), match=words):
        reshape_and_cache(*(given | changed).values())
    untouched = caches(2, 16, 2, 16, cache[0].dtype, fill)
    assert_same(cache[0], untouched[0]), assert_same(cache[1], untouched[1])
