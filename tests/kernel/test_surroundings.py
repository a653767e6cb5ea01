"""What the caller's surroundings must not change: autocast, default dtype and device, numpy's
integers, autograd, strides. And extremes: logits of -inf, values near float32's end."""

import numpy as np
import pytest
import torch
from helpers import assert_close, oracle
from pools import paged, random

from paged_attention import PagedKVCache, merge_states, paged_attention, reference_attention
from paged_attention.inputs import random_inputs
from paged_attention.measure.timing import measure
from paged_attention.measure.yardstick import FloorReader

pytestmark = pytest.mark.quick
LAYOUTS = ("vllm", "HND", "NHD")
in_each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def call(layout, seq_lens=(50, 7), **options):
    dense = random(list(seq_lens), 6, 2, 16, seed=3, sharp=4.0)
    return dense, (dense.query, *paged(dense, 8, layout)), {"layout": layout, **options}


@in_each_layout
def test_autocast_leaves_the_arithmetic_in_float32(layout):
    _, args, options = call(layout, partition_size=16, return_lse=True)
    out, lse = paged_attention(*args, **options)
    states = torch.stack([out, out * 3]), torch.stack([lse, lse + 0.3])
    merged = merge_states(*states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(paged_attention(*args, **options)[0], out)
        assert torch.equal(merge_states(*states)[0], merged[0])


@in_each_layout
def test_a_default_device_elsewhere_changes_nothing(layout):
    _, args, options = call(layout)
    right = paged_attention(*args, **options)
    cache = PagedKVCache(8, 4, 2, 16, layout=layout)
    with torch.device("meta"):
        out = torch.empty(right.shape, device="cpu")
        paged_attention(*args, **options, out=out)
        expected, _ = reference_attention(*args, **options)
        slots = cache.extend("a", 6)
        tables, lens = cache.block_tables(["a"]), random_inputs([5]).seq_lens
    assert torch.equal(out, right)
    assert_close(out, expected)
    assert tables.tolist() == [[0, 1]] and lens.tolist() == [5]
    assert slots.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_default_dtype_does_not_change_the_floor():
    try:
        torch.set_default_dtype(torch.float64)
        reader = FloorReader(2**20)
    finally:
        torch.set_default_dtype(torch.float32)
    assert reader.key.nbytes + reader.value.nbytes == reader.num_bytes


@pytest.mark.parametrize("size", [np.uint16(65535), np.uint8(4), np.int32(2**31 - 1)])
def test_a_numpy_partition_size_does_not_wrap(size):
    _, args, options = call("HND", seq_lens=(300,))
    assert torch.equal(
        paged_attention(*args, **options, partition_size=size),
        paged_attention(*args, **options, partition_size=int(size)),
    )


def test_numpy_sizes_do_not_wrap_in_the_cache():
    cache = PagedKVCache(np.uint8(40), np.uint8(16), np.int64(2), np.int8(8))
    for tokens in (np.int8(100), np.int8(100), np.uint8(200)):
        cache.extend("a", tokens)
    assert cache.seq_lens(["a"]).tolist() == [400]
    assert cache.num_free_blocks == 40 - 25


def test_writing_keys_that_require_grad_leaves_the_pool_without_a_graph():
    cache = PagedKVCache(2, 4, 1, 8)
    key = torch.randn(3, 1, 8, requires_grad=True)
    cache.write(key, key * 2, cache.extend("a", 3))
    assert not cache.key_cache().requires_grad and not cache.value_cache().requires_grad
    assert torch.equal(cache.key_cache()[0, 0, :3], key[:, 0])


@in_each_layout
def test_a_transposed_query_gives_the_bits_of_a_contiguous_one(layout):
    _, (query, *rest), options = call(layout, seq_lens=(50, 130, 7))
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    right = paged_attention(query, *rest, **options)
    assert torch.equal(paged_attention(strided, *rest, **options), right)


@pytest.mark.parametrize("v_scale", [float("nan"), float("inf"), -1.0])
def test_an_empty_row_is_plus_zero_whatever_the_scale(v_scale):
    _, args, options = call("HND", seq_lens=(5, 0))
    options |= {"validate": False, "return_lse": True}  # or what isn't finite is refused
    out, lse = paged_attention(*args, **options, v_scale=torch.tensor(v_scale))
    assert torch.equal(torch.copysign(torch.ones(6, 16), out[1]), torch.ones(6, 16))
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("partition_size", [4, 8, 12])
def test_a_partition_of_logits_that_underflow_to_minus_infinity_counts_nothing(partition_size):
    key = torch.ones(1, 8, 1, 4)
    key[0, :4] = -1e38  # times 4 lanes: -inf in float32
    value = torch.arange(8.0).view(1, 8, 1, 1).expand(1, 8, 1, 4)
    pool = [x.view(2, 4, 1, 4).transpose(1, 2) for x in (key, value.contiguous())]
    out, lse = paged_attention(
        torch.ones(1, 1, 4), *pool, torch.tensor([[0, 1]]), torch.tensor([8]),
        layout="HND", scale=1.0, partition_size=partition_size, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, torch.full((1, 1, 4), 5.5))
    assert_close(lse, torch.full((1, 1), 4 + np.log(4.0), dtype=torch.float64))


def test_without_validation_a_bad_id_leads_out_of_a_pool_of_one_block_too():
    _, (query, key, value, tables, lens), options = call("HND", seq_lens=(5,))
    one = key[tables[0, :1].long()], value[tables[0, :1].long()]
    for bad in (7, 1, -1):
        tables = torch.tensor([[bad]], dtype=torch.int32)
        with pytest.raises(IndexError):
            paged_attention(query, *one, tables, lens, **options, validate=False)


def test_a_device_may_be_named_with_its_index():
    assert measure(lambda: torch.ones(3) + 1, device="cpu:0", min_seconds=0).device == "cpu"
    with pytest.raises(ValueError, match="min_seconds=inf"):
        measure(lambda: None, min_seconds=float("inf"))


def test_the_oracle_agrees_with_the_reference():
    dense, args, options = call("HND")
    assert_close(reference_attention(*args, **options, scale=0.25)[0], oracle(*dense, 0.25)[0])


def test_scales_are_multiplied_as_numbers_before_they_meet_the_query():
    _, args, options = call("HND", seq_lens=(40,))
    plain = paged_attention(*args, **options, scale=0.5)
    assert_close(paged_attention(*args, **options, scale=0.5e30, k_scale=1e-30), plain.double())


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_own_07_a_scale_in_a_tensor_meets_the_other_scale_before_the_query(shape):
    _, (query, *rest), options = call("HND", seq_lens=(40,))
    large = query * 1e10  # times 1e30 it is beyond float32
    right = paged_attention(large, *rest, **options, scale=1e30, k_scale=1e-41)
    for dtype in (torch.float32, torch.float64):
        k_scale = torch.full(shape, 1e-41, dtype=torch.float64).to(dtype)
        out = paged_attention(large, *rest, **options, scale=1e30, k_scale=k_scale)
        if dtype == torch.float64:
            assert torch.equal(out, right)
        assert out.isfinite().all()
