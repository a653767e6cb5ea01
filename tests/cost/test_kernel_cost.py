"""The cost model says beforehand what the kernel turns out to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from byte_counter import ByteCounter
from helpers import DTYPES, LAYOUTS, lanes_per_chunk
from hypothesis import given
from hypothesis import strategies as st
from paged_attention.cost.kernel import paged_attention as walk
from paged_attention.cost.tape import Tape

from paged_attention import Workspace, paged_attention, plan_decode
from paged_attention.cost.predict import Shape, predict, seconds_of
from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure

quick = pytest.mark.quick
SIZES = "num_heads", "num_kv_heads", "head_size", "block_size"


def sizes_of(shape):
    return {name: getattr(shape, name) for name in SIZES}


def call_of(shape, device="cpu"):
    """A first call of the kernel: its workspace holds nothing yet."""
    inputs = random_inputs(
        shape.seq_lens,
        dtype=shape.dtype,
        layout=shape.layout,
        device=device,
        poison=False,
        **sizes_of(shape),
    )
    return lambda: paged_attention(
        *inputs,
        layout=shape.layout,
        partition_size=shape.partition_size,
        workspace=Workspace(),
    )


def assert_as_counted(shape):
    call = call_of(shape)
    cost, counts = predict("paged_attention", shape), count(call)
    assert (cost.ops, cost.gemms, cost.host_reads) == (
        counts.ops,
        counts.gemms,
        counts.host_reads,
    )
    assert cost.temporary_bytes == counts.peak_bytes
    with ByteCounter() as counter:
        call()
    assert (cost.bytes_read, cost.bytes_written) == (counter.read, counter.written)


@st.composite
def shapes(draw):
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    num_kv_heads = draw(st.sampled_from([1, 1, 2, 3, 4]))
    block_size = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 64]))
    partition_size = draw(st.sampled_from([None, 1, block_size, 3 * block_size, 5, 20, 64, 100]))
    whole = -(-(partition_size or 64) // block_size) * block_size
    lengths = st.one_of(
        st.integers(0, 150), st.sampled_from([0, 1, block_size, whole - 1, whole, whole + 1])
    )
    lanes = lanes_per_chunk(dtype) if layout == "vllm" else 1
    return Shape(
        draw(st.lists(lengths, max_size=5)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 6, 7])),
        num_kv_heads=num_kv_heads,
        head_size=lanes * draw(st.sampled_from([1, 2, 3, 5, 10])),
        block_size=block_size,
        partition_size=partition_size,
        dtype=dtype,
        layout=layout,
    )


@given(shape=shapes())
def test_ops_gemms_bytes_and_peak_are_what_is_counted(shape):
    assert_as_counted(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lens", [[], [0], [1024], [1025], [2100, 0, 4096], [1024, 7, 40, 2000, 1024]]
)
def test_the_workloads_shape_is_predicted_exactly(lens, layout):
    """Partitions of 1,024 tokens, waves of 2,048: what the kernel chooses on a CPU."""
    assert_as_counted(Shape(lens, layout=layout))


@pytest.mark.parametrize(
    "lens, num_heads, num_kv_heads, head_size",
    [
        ([20_000], 128, 1, 64),  # logits fill a wave before K does
        ([700, 5000], 2, 2, 4096),  # a wave holds less than a partition
    ],
)
def test_what_fills_a_wave_is_predicted_exactly(lens, num_heads, num_kv_heads, head_size):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    assert_as_counted(Shape(lens, **sizes))


def test_at_100_000_tokens_it_is_what_is_counted_without_data():
    shape = Shape([100_000])
    counts, cost = count(on_meta(shape)), predict("paged_attention", shape)
    # Without data block ids can't be checked, and the schedule's numbers take two copies to get
    # where the data would be.
    check = cost.steps[0]
    assert (check.label, check.ops, check.host_reads) == ("check", 5, 1)
    assert (cost.ops - 5 + 2, cost.gemms, cost.temporary_bytes) == (
        counts.ops,
        counts.gemms,
        counts.peak_bytes,
    )
    assert cost.temporary_bytes < 12_000_000


def on_meta(shape):
    inputs = random_inputs(shape.seq_lens, device="meta", **sizes_of(shape))
    inputs = inputs._replace(block_tables=inputs.block_tables.to("meta"))
    return lambda: paged_attention(*inputs, validate=False)


@quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [[3000], [700, 0, 5000], []])
def test_its_workspace_is_the_plans(lens, dtype):
    tape, shape = Tape(), Shape(lens, dtype=dtype)
    plan = plan_decode(**sizes_of(shape), layout="vllm", dtype=dtype, seq_lens=lens)
    out = walk(tape, shape, PROFILES["cpu"].wave_bytes)
    assert tape.alive == out.nbytes  # the workspace went with the walk
    kept = tape.peak - plan.workspace_bytes - out.nbytes  # the schedule's numbers
    assert 0 < kept < 0.05 * plan.workspace_bytes + 2_000


@quick
def test_waves_follow_the_devices_profile():
    """A GPU's waves are so large that at 8,192 tokens there is one of them."""
    shape = Shape([8192])
    assert predict("paged_attention", shape).gemms == 4 * 3 + 1
    assert predict("paged_attention", shape, PROFILES["H200"]).gemms == 3 + 1


@quick
def test_the_kernel_moves_k_and_v_three_times_and_the_last_stage_six_times_and_more():
    shape = Shape([100_000])
    kernel, stage = (predict(name, shape) for name in ("paged_attention", "fused_phase2"))
    assert 3.0 < kernel.bytes_moved / shape.kv_bytes < 3.15
    assert 6.5 < stage.bytes_moved / shape.kv_bytes < 6.75


@quick
def test_only_the_vllm_layout_rearranges():
    gathers = {
        layout: next(
            step
            for step in predict("paged_attention", Shape([5000], layout=layout)).steps
            if step.label == "gather"
        )
        for layout in LAYOUTS
    }
    assert gathers["vllm"].rearranged_bytes == gathers["vllm"].bytes_moved
    assert gathers["HND"].rearranged_bytes == gathers["NHD"].rearranged_bytes == 0


EXACT = DeviceProfile(
    "exact",
    Figure(2.0, 4.0, "B/s", ""),
    Figure(10.0, 30.0, "s", ""),
    wave=Figure(2**20, 2**20, "B", ""),
)


@quick
@pytest.mark.parametrize("profile", [EXACT, PROFILES["BI-V100"], PROFILES["H200"]])
def test_seconds_are_its_steps_seconds(profile):
    cost = predict("paged_attention", Shape([700, 3]), profile)
    steps = [seconds_of(step, profile) for step in cost.steps]
    assert cost.seconds.low == pytest.approx(sum(s.low for s in steps))
    assert cost.seconds.high == pytest.approx(sum(s.high for s in steps))
    assert 0 < cost.seconds.low <= cost.seconds.high


@quick
def test_a_workspace_is_never_fresh():
    profile = replace(EXACT, fresh_page_cost=Figure(5.0, 7.0, "s/B", ""), fresh_from=1_000_000)
    cost = predict("paged_attention", Shape([20_000]), profile)
    assert cost.temporary_bytes > 2_000_000
    assert all(step.fresh_bytes == 0 for step in cost.steps)
