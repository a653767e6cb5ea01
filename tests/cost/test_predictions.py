"""A prediction is what a run turns out to cost, for the stages and for the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from pools import LAYOUTS, lanes_per_chunk

from paged_attention import Workspace, paged_attention
from paged_attention.cost import NAMES, PROFILES, DeviceProfile, Figure, Shape, cost_of, predict
from paged_attention.inputs import random_inputs
from paged_attention.measure import count, profiler_peak_bytes
from paged_attention.stages import STAGES

quick = pytest.mark.quick
KERNEL = "paged_attention"
ONE = Figure(1.0, 1.0, "", "")
FRESH = DeviceProfile("fresh", ONE, ONE, fresh_page_cost=ONE, fresh_from=1000, wave=ONE)


def run_of(name, shape, device="cpu"):
    """A call of a stage, or a first one of the kernel, whose workspace holds nothing yet."""
    sizes = ("num_heads", "num_kv_heads", "head_size", "block_size", "dtype", "layout")
    sizes = {size: getattr(shape, size) for size in sizes}
    inputs = random_inputs(shape.seq_lens, **sizes, poison=False, device=device)
    given = {} if shape.partition_size is None else {"partition_size": shape.partition_size}
    if name == KERNEL:
        given["layout"] = shape.layout
        return lambda: paged_attention(*inputs, **given, workspace=Workspace())
    return lambda: STAGES[name](*inputs, 0.1, **given)


def assert_costs_what_is_predicted(name, shape):
    run, profile = run_of(name, shape), None if name == KERNEL else FRESH
    cost, counts = predict(name, shape, profile), count(run)
    assert cost == cost_of(run, profile)
    assert (cost.ops, cost.gemms) == (counts.ops, counts.gemms)
    assert (cost.host_reads, cost.temporary_bytes) == (counts.host_reads, counts.peak_bytes)


@st.composite
def shapes(draw, name):
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(LAYOUTS if name == KERNEL else ["vllm"]))
    num_kv_heads = draw(st.sampled_from([1, 1, 2, 3, 4]))
    block_size = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 64]))
    partition_size = draw(st.sampled_from([None, 1, block_size, 3 * block_size, 5, 20, 64, 100]))
    whole = -(-(partition_size or 64) // block_size) * block_size
    edges = st.sampled_from([0, 1, block_size, whole - 1, whole, whole + 1])
    lengths = draw(st.lists(edges | st.integers(0, 150), max_size=5))
    lanes = lanes_per_chunk(dtype) if layout == "vllm" else 1
    return Shape(
        lengths,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 6, 7])),
        num_kv_heads=num_kv_heads,
        head_size=lanes * draw(st.sampled_from([1, 2, 3, 5, 10])),
        block_size=block_size,
        partition_size=partition_size,
        dtype=dtype,
        layout=layout,
    )


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_prediction_is_what_a_run_costs(name, data):
    assert_costs_what_is_predicted(name, data.draw(shapes(name)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lens", [[], [0], [513], [1025], [1024, 7, 0, 2100, 1024]])
def test_the_workloads_shape_is_predicted_exactly(name, lens):
    """The kernel's partitions are 1,024 tokens here, and its waves 2,048."""
    assert_costs_what_is_predicted(name, Shape(lens))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tokens, partition_size", [(95, 16), (700, 16), (1500, 70), (9000, None)])
def test_a_long_sequence_costs_what_all_trips_through_its_loops_do(stage, tokens, partition_size):
    """Most trips are extrapolated. The peak of naive_loops is in Phase 1 or, with 43 partitions of
    16 tokens, in Phase 2. That of the other stages is at the gather or the padding."""
    for dtype in (torch.float32, torch.float16):
        shape = Shape([tokens], 6, 2, 16, 16, partition_size, dtype)
        assert predict(stage, shape, FRESH) == cost_of(run_of(stage, shape, "meta"), FRESH)


@quick
@pytest.mark.parametrize("name", NAMES)
def test_a_prediction_takes_no_memory_for_data(name):
    shape = Shape([90_001])
    assert profiler_peak_bytes(lambda: predict(name, shape)) < 3_000_000
    assert predict(name, shape).temporary_bytes > 10_000_000


@quick
def test_waves_follow_the_devices_profile():
    """A GPU's waves are so large that at 8,192 tokens there is one of them."""
    shape = Shape([8192])
    assert predict(KERNEL, shape).gemms == 4 * 3 + 1
    assert predict(KERNEL, shape, PROFILES["H200"]).gemms == 3 + 1


@quick
def test_a_workspace_is_never_fresh():
    profile = replace(FRESH, fresh_from=200_000, wave=Figure(2**20, 2**20, "B", ""))
    cost = predict(KERNEL, Shape([20_000]), profile)
    assert cost.temporary_bytes > 2_000_000
    assert all(step.fresh_bytes == 0 for step in cost.steps)
