"""Each lesson stage is right on every input, not only on the one its notebook shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import (
    DTYPES,
    STAGE_NAMES,
    assert_close,
    assert_same,
    on_each_device,
    oracle,
    rounding,
)
from hypothesis import given
from hypothesis import strategies as st
from pools import Dense, generated, lanes_per_chunk, paged, random, to

from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import count
from paged_attention.stages import STAGES

each_stage = pytest.mark.parametrize("stage", STAGE_NAMES)
REAL = Path(__file__).parents[2] / "notebooks" / "data" / "smollm2.npz"


def test_the_stages_are_the_ladder_in_order():
    assert tuple(STAGES) == STAGE_NAMES
    assert all(callable(fn) for fn in STAGES.values())


@pytest.mark.quick
@on_each_device
@each_stage
@pytest.mark.parametrize("num_heads, num_kv_heads", [(24, 4), (9, 3), (5, 1), (3, 3)])
def test_ragged_lengths_around_partition_boundaries(device, stage, num_heads, num_kv_heads):
    """Lengths 0 and 1, and a partition's size -1, 0, +1, once and several times; sharp logits."""
    lens = [0, 1, *(n * 32 + d for n in (1, 2, 4) for d in (-1, 0, 1)), 5]
    dense = random(lens, num_heads, num_kv_heads, 20, seed=num_heads, sharp=5.0)
    pool = paged(to(dense, device=device), 16, "vllm", device=device)
    right = oracle(*dense, 0.3)[0]
    for partition_size in (32, 512):
        out = STAGES[stage](dense.query.to(device), *pool, 0.3, partition_size=partition_size)
        assert out.dtype == torch.float32 and out.shape == dense.query.shape
        assert_close(out, right, extra=rounding(dense, 0.3))


@pytest.mark.parametrize("stage", STAGE_NAMES[STAGE_NAMES.index("gqa_broadcast") :])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(24, 4), (24, 1), (4, 4)])
@pytest.mark.parametrize("tokens", [300, 5000])
def test_from_gqa_broadcast_on_no_tensor_is_larger_than_k_padded(
    stage, num_heads, num_kv_heads, tokens
):
    """An assignment broadcasts: with one KV head, V copied for every head gives right results."""
    inputs = random_inputs([tokens], num_heads=num_heads, num_kv_heads=num_kv_heads, device="meta")
    whole_partitions = -(-tokens // 512) * 512
    largest = count(lambda: STAGES[stage](*inputs, 1 / 16)).largest
    assert largest <= num_kv_heads * whole_partitions * 256


@each_stage
@given(data=st.data())
def test_any_shape_dtype_and_partition_size(stage, data):
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3, 7]))
    head_size = lanes_per_chunk(dtype) * draw(st.sampled_from([1, 3, 5]))
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    lens = draw(st.lists(st.integers(0, 50), max_size=4))
    seed, sharp = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 1.0, 8.0, 40.0]))
    dense = random(lens, num_heads, num_kv_heads, head_size, seed=seed, sharp=sharp, dtype=dtype)
    query = torch.randn(dense.query.shape, generator=torch.Generator().manual_seed(seed + 1))
    dense = dense._replace(query=query.to(draw(st.sampled_from(DTYPES))))
    pool = paged(
        dense,
        block_size,
        "vllm",
        dtype=dtype,
        seed=seed,
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    partition_size = draw(st.sampled_from([1, block_size, 2 * block_size, 7, 20, 64, 512]))
    scale = draw(st.sampled_from([head_size**-0.5, 0.3, 1.0]))
    out = STAGES[stage](dense.query, *pool, scale, partition_size=partition_size)
    assert out.dtype == dense.query.dtype and out.shape == dense.query.shape
    assert_close(out, oracle(*dense, scale)[0], extra=rounding(dense, scale))


@pytest.mark.quick
@each_stage
def test_partition_size_defaults_to_512_and_is_rounded_up_to_whole_blocks(stage):
    dense = random([600, 40], 2, 1, 16, seed=2, sharp=3.0)
    pool = paged(dense, 48, "vllm")
    call = (dense.query, *pool, 0.25)
    assert_same(STAGES[stage](*call), STAGES[stage](*call, partition_size=512))
    for asked, rounded in ((512, 528), (1, 48), (49, 96)):
        assert_same(
            STAGES[stage](*call, partition_size=asked),
            STAGES[stage](*call, partition_size=rounded),
        )


@pytest.mark.quick
@each_stage
def test_every_token_counts_wherever_it_is(stage):
    """Each position in turn holds the only key that matters: a token lost anywhere shows."""
    tokens = 19
    query = torch.zeros(tokens, 2, 16)
    query[..., 3] = 1.0
    keys = [torch.full((tokens, 1, 16), -1.0) for _ in range(tokens)]
    for winner, key in enumerate(keys):
        key[winner, 0, 3] = 60.0
    value = torch.arange(float(tokens))[:, None, None].repeat(1, 1, 16)
    pool = paged(Dense(query, keys, [value] * tokens), 4, "vllm")
    right = torch.arange(float(tokens))[:, None, None].expand(tokens, 2, 16)
    for partition_size in (4, 8, 512):
        out = STAGES[stage](query, *pool, 1.0, partition_size=partition_size)
        assert_close(out, right)


@pytest.mark.quick
@each_stage
def test_partitions_whose_maxima_lie_far_apart(stage):
    """exp of the difference is 0, or would overflow: a merge without the maxima shows."""
    for maxima in ([-200.0, 0.0, 200.0], [300.0, 0.0, -300.0], [90.0, 100.0, 95.0], [-2e4] * 3):
        key = torch.zeros(24, 1, 16)
        for p, m in enumerate(maxima):
            key[8 * p : 8 * p + 8, 0, 0] = m - 5
            key[8 * p + 3, 0, 0] = m
        query = torch.zeros(1, 1, 16)
        query[..., 0] = 1.0
        value = generated([24], 1, 1, 16).values[0]
        dense = Dense(query, [key], [value])
        pool = paged(dense, 8, "vllm")
        for partition_size in (8, 16, 512):
            out = STAGES[stage](query, *pool, 1.0, partition_size=partition_size)
            assert_close(out, oracle(*dense, 1.0)[0])


@pytest.mark.parametrize("layer", [7, 18])
@each_stage
def test_a_real_models_keys(stage, layer):
    """Four positions of SmolLM2 as a ragged batch; layer 18 has partitions 20 and more apart."""
    import numpy as np

    with np.load(REAL) as file:
        positions = file["query_positions"].tolist()
        names = ("query", "key", "value")
        query, key, value = (torch.from_numpy(file[f"layer{layer}_{name}"]) for name in names)
    lens = [1957, 1, 1539, 513]
    rows = [positions.index(n - 1) for n in lens]
    dense = Dense(query[rows], [key[:n] for n in lens], [value[:n] for n in lens])
    pool = paged(dense, 16, "vllm", seed=layer)
    for partition_size in (512, 128):
        out = STAGES[stage](dense.query, *pool, 0.125, partition_size=partition_size)
        assert_close(out, oracle(*dense, 0.125)[0])
