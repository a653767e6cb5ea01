"""The cost model says beforehand what the stages turn out to do."""

from __future__ import annotations

import pytest
from helpers import DTYPES, STAGE_NAMES, lanes_per_chunk
from hypothesis import given
from hypothesis import strategies as st

from paged_attention.cost import Shape, predict
from paged_attention.counting import count
from paged_attention.inputs import random_inputs
from paged_attention.stages import STAGES

each_stage = pytest.mark.parametrize("stage", STAGE_NAMES)
WORKLOAD = Shape([100_000])


def counted(stage, shape):
    inputs = random_inputs(
        shape.seq_lens,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        dtype=shape.dtype,
        device="meta",
    )
    return count(lambda: STAGES[stage](*inputs, 0.1, partition_size=shape.partition_size))


def assert_as_counted(stage, shape):
    cost, counts = predict(stage, shape), counted(stage, shape)
    assert (cost.ops, cost.gemms, cost.host_reads) == (
        counts.ops,
        counts.gemms,
        counts.host_reads,
    )
    assert cost.temporary_bytes == counts.peak_bytes


@st.composite
def shapes(draw):
    dtype = draw(st.sampled_from(DTYPES))
    num_kv_heads = draw(st.sampled_from([1, 1, 2, 3, 4]))
    block_size = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 64]))
    partition_size = draw(st.sampled_from([1, block_size, 3 * block_size, 5, 20, 64, 100]))
    whole = -(-partition_size // block_size) * block_size
    lengths = st.one_of(
        st.integers(0, 150), st.sampled_from([0, 1, block_size, whole - 1, whole, whole + 1])
    )
    return Shape(
        draw(st.lists(lengths, max_size=4)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 6, 7])),
        num_kv_heads=num_kv_heads,
        head_size=lanes_per_chunk(dtype) * draw(st.sampled_from([1, 2, 3, 5, 10])),
        block_size=block_size,
        partition_size=partition_size,
        dtype=dtype,
    )


@each_stage
@given(shape=shapes())
def test_ops_gemms_and_peak_are_what_is_counted(stage, shape):
    assert_as_counted(stage, shape)
