"""The plugin in a real vLLM, on a CPU: found by its entry point, and taken by forward_decode.

`make test-vllm` runs this in an environment of each of the wheels; `make test` doesn't.
"""

import os

import pytest
import torch
from helpers import assert_close, oracle, rounding
from pools import random
from vllm import __version__ as version
from vllm import _custom_ops as ops
from vllm.attention.ops.paged_attn import PagedAttention
from vllm.plugins import load_general_plugins

import paged_attention.vllm as ours

BLOCK, HEADS, KV_HEADS, HEAD = 16, 6, 2, 64
TENSOR_SCALES = tuple(map(int, version.split(".")[:2])) >= (0, 7)
NAMES = ("paged_attention_v1", "paged_attention_v2", "reshape_and_cache")
FOUND = {name: getattr(ops, name) for name in NAMES} | {
    "forward_decode": PagedAttention.forward_decode
}


@pytest.fixture(autouse=True, scope="module")
def plugin():
    load_general_plugins()
    yield
    ours.unregister()
    left = {name: getattr(ops, name) for name in NAMES}
    assert left | {"forward_decode": PagedAttention.forward_decode} == FOUND


@pytest.fixture
def calls(monkeypatch):
    """The operations that get called, in order."""
    called = []

    def spy(name, served):
        def run(*args, **kwargs):
            called.append(name)
            return served(*args, **kwargs)

        return run

    for name in NAMES:
        monkeypatch.setattr(ops, name, spy(name, getattr(ops, name)))
    return called


def decode(lens, dtype=torch.float32, kv_cache_dtype="auto", slopes=None, scales=(1.0, 1.0)):
    """(out, what it should be, tolerance): written and read by vLLM's own PagedAttention."""
    dense = random(lens, HEADS, KV_HEADS, HEAD, sharp=2.0, dtype=dtype)
    blocks = [-(-n // BLOCK) for n in lens]
    num_blocks = sum(blocks) + 3
    ids = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lens), max(blocks) + 1), -1, dtype=torch.int32)
    stored = torch.uint8 if kv_cache_dtype != "auto" else dtype
    shape = PagedAttention.get_kv_cache_shape(num_blocks, BLOCK, KV_HEADS, HEAD)
    kv_cache = torch.empty(shape, dtype=stored).fill_(0x7F if stored == torch.uint8 else torch.nan)
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, HEAD)
    k_scale, v_scale = map(torch.tensor, scales) if TENSOR_SCALES else scales
    for row, key, value in zip(tables, dense.keys, dense.values):
        owned = torch.tensor([ids.pop() for _ in range(-(-len(key) // BLOCK))], dtype=torch.int32)
        row[: len(owned)] = owned
        t = torch.arange(len(key))
        slots = owned[t // BLOCK].long() * BLOCK + t % BLOCK
        where = key_cache, value_cache, slots, kv_cache_dtype, k_scale, v_scale
        PagedAttention.write_to_paged_cache(key, value, *where)
    out = PagedAttention.forward_decode(
        *(dense.query, key_cache, value_cache, tables, torch.tensor(lens, dtype=torch.int32)),
        *(max(lens), kv_cache_dtype, KV_HEADS, HEAD**-0.5, slopes, k_scale, v_scale),
    )
    if stored == torch.uint8:
        k, v = scales
        dense = dense._replace(
            keys=[(x / k).to(torch.float8_e4m3fn).float() * k for x in dense.keys],
            values=[(x / v).to(torch.float8_e4m3fn).float() * v for x in dense.values],
        )
    return out, oracle(*dense, slopes=slopes)[0], rounding(dense)


def test_this_is_the_vllm_that_was_asked_for():
    assert version == os.environ["VLLM_VERSION"]


def test_the_entry_point_put_ours_behind_vllms_names():
    assert [getattr(ops, name) for name in NAMES] == [getattr(ours, name) for name in NAMES]
    assert PagedAttention.forward_decode is not FOUND["forward_decode"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "lens, served",
    [([5, 1, 33], "paged_attention_v1"), ([700, 8192], "paged_attention_v1")]
    + [([8193, 5], "paged_attention_v2")],
)
def test_a_batch_is_plain_softmax_by_v1_or_v2(lens, served, dtype, calls):
    out, wanted, extra = decode(lens, dtype)
    assert out.dtype == dtype
    assert_close(out, wanted, extra=extra)
    assert calls == ["reshape_and_cache"] * len(lens) + [served]


@pytest.mark.parametrize("lens", [[700, 20], [8200]])
def test_alibi_is_plain_softmax_with_a_bias(lens):
    out, wanted, extra = decode(lens, slopes=torch.linspace(-0.01, 0.02, HEADS))
    assert_close(out, wanted, extra=extra)


@pytest.mark.parametrize("lens", [[700, 20], [8200]])
def test_an_fp8_cache_is_read_back_by_its_scales(lens):
    out, wanted, extra = decode(lens, kv_cache_dtype="fp8", scales=(0.05, 0.125))
    assert_close(out, wanted, extra=extra)


def test_block_sparse_attention_is_refused_by_name():
    tensors = torch.zeros(1, HEADS, HEAD), torch.zeros(1, KV_HEADS, HEAD // 4, BLOCK, 4)
    step = *tensors, torch.zeros(1, KV_HEADS, HEAD, BLOCK), torch.zeros(1, 1, dtype=torch.int32)
    rest = torch.tensor([3]), 3, "auto", KV_HEADS, 1.0, None, 1.0, 1.0, 0, 16, 8
    with pytest.raises(ValueError, match="blocksparse_vert_stride"):
        PagedAttention.forward_decode(*step, *rest)
