"""The cost model says beforehand what the stages turn out to do."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from byte_counter import ByteCounter
from helpers import DTYPES, STAGE_NAMES, lanes_per_chunk
from hypothesis import given
from hypothesis import strategies as st
from paged_attention.cost.stages import STAGE_COSTS
from paged_attention.cost.tape import Tape

from paged_attention.cost.predict import Shape, Step, predict, seconds_of
from paged_attention.inputs import random_inputs
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure
from paged_attention.stages import STAGES

each_stage = pytest.mark.parametrize("stage", STAGE_NAMES)
WORKLOAD = Shape([100_000])


def on_meta(stage, shape):
    """A call of the stage on tensors without data."""
    inputs = random_inputs(
        shape.seq_lens,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        dtype=shape.dtype,
        device="meta",
    )
    given = {} if shape.partition_size is None else {"partition_size": shape.partition_size}
    return lambda: STAGES[stage](*inputs, 0.1, **given)


def assert_as_counted(stage, shape):
    call = on_meta(stage, shape)
    cost, counts = predict(stage, shape), count(call)
    assert (cost.ops, cost.gemms, cost.host_reads) == (
        counts.ops,
        counts.gemms,
        counts.host_reads,
    )
    assert cost.temporary_bytes == counts.peak_bytes
    with ByteCounter() as counter:
        call()
    assert (cost.bytes_read, cost.bytes_written) == (counter.read, counter.written)


@pytest.mark.quick
def test_the_default_partition_is_the_stages_own():
    for name, stage in STAGES.items():
        default = inspect.signature(stage).parameters["partition_size"].default
        shape = Shape([3 * default + 1])
        assert predict(name, shape) == predict(name, replace(shape, partition_size=default))


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
def test_ops_gemms_bytes_and_peak_are_what_is_counted(stage, shape):
    assert_as_counted(stage, shape)


@each_stage
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [[], [0], [512], [513], [1, 0, 1024], [1500, 40, 600, 512]])
def test_the_workloads_shape_is_predicted_exactly(stage, dtype, lens):
    assert_as_counted(stage, Shape(lens, dtype=dtype))


@pytest.mark.quick
def test_nothing_of_a_stage_is_alive_after_its_walk_but_the_result():
    for name in STAGE_NAMES:
        tape = Tape()
        out = STAGE_COSTS[name](tape, Shape([1300, 0, 40]))
        assert tape.alive == out.nbytes == 3 * 24 * 256 * 4


# -- bytes --


@pytest.mark.quick
def test_bytes_of_a_hand_counted_step():
    """One token, one head of four lanes, one block of one slot, float32."""
    shape = Shape([1], num_heads=1, num_kv_heads=1, head_size=4, block_size=1, partition_size=1)
    cost = predict("single_tile", shape)
    assert {
        step.label: (step.ops, step.bytes_read, step.bytes_written) for step in cost.steps
    } == {
        "set up": (3, 4 + 16, 16 + 16),  # zeros; the length, on the host; q times scale
        "gather": (3, 4 + 2 * (16 + 8), 8 + 2 * 16),  # the id as int64; K and V, each by the id
        "GEMMs": (2, (16 + 16) + (4 + 16), 4 + 16),
        "softmax": (1, 4, 4),
        "output": (1, 16, 16),
    }
    assert cost.bytes_read == 20 + 52 + 52 + 4 + 16
    assert cost.bytes_written == 32 + 40 + 20 + 4 + 16
    assert cost.bytes_moved == cost.bytes_read + cost.bytes_written


@pytest.mark.quick
def test_the_series_traffic_in_multiples_of_k_and_v():
    """15 for the loops, 17 for the gather, 26 for the padded bmm, under 7 without repeated heads;
    the rest is logits, queries and ids."""
    times = {name: predict(name, WORKLOAD).bytes_moved / WORKLOAD.kv_bytes for name in STAGE_NAMES}
    assert WORKLOAD.kv_bytes == 819_200_000
    assert 15 < times["naive_loops"] < 15.2
    assert 17 < times["batched_gather"] < 17.2
    assert 26 < times["single_bmm"] < 26.3
    assert times["gqa_broadcast"] == times["single_tile"]
    assert 6.5 < times["fused_phase2"] < 6.75


@pytest.mark.quick
def test_what_changes_an_order_is_rearranging_and_copying_whole_blocks_is_not():
    for name in STAGE_NAMES:
        for step in predict(name, Shape([1600])).steps:
            if step.label in ("fetch", "reorder", "repeat", "regroup"):
                ids = 100 * 4 if step.label == "fetch" else 0
                assert step.rearranged_bytes == step.bytes_moved - ids
            else:
                assert step.rearranged_bytes == 0


@pytest.mark.quick
def test_only_the_halves_convert():
    for dtype in DTYPES:
        labels = {step.label for step in predict("gqa_broadcast", Shape([99], dtype=dtype)).steps}
        assert ("convert" in labels) == (dtype.itemsize == 2)


@pytest.mark.quick
@each_stage
def test_steps_add_up(stage):
    cost = predict(stage, WORKLOAD)
    for name in ("ops", "gemms", "host_reads", "bytes_read", "bytes_written"):
        assert getattr(cost, name) == sum(getattr(step, name) for step in cost.steps)
    assert len({step.label for step in cost.steps}) == len(cost.steps)
    assert all(step.rearranged_bytes <= step.bytes_moved for step in cost.steps)


# -- seconds --

EXACT = DeviceProfile("exact", Figure(2.0, 4.0, "B/s", ""), Figure(10.0, 30.0, "s", ""))
RICH = replace(
    EXACT,
    rearrange_bandwidth=Figure(1.0, 2.0, "B/s", ""),
    fresh_page_cost=Figure(5.0, 7.0, "s/B", ""),
    fresh_from=1000,
)


@pytest.mark.quick
def test_seconds_are_ops_times_their_cost_plus_bytes_over_bandwidth():
    step = Step("any", ops=3, bytes_read=40, bytes_written=8, rearranged_bytes=16, fresh_bytes=2)
    plain, rich = seconds_of(step, EXACT), seconds_of(step, RICH)
    assert (plain.low, plain.high, plain.unit) == (3 * 10 + 48 / 4, 3 * 30 + 48 / 2, "s")
    assert (rich.low, rich.high) == (30 + 32 / 4 + 16 / 2 + 2 * 5, 90 + 32 / 2 + 16 / 1 + 2 * 7)
    assert "exact" in plain.source


@pytest.mark.quick
@each_stage
def test_a_stages_seconds_are_its_steps_seconds(stage):
    for profile in (EXACT, RICH, PROFILES["BI-V100"], PROFILES["H200"]):
        cost = predict(stage, Shape([700, 3]), profile)
        steps = [seconds_of(step, profile) for step in cost.steps]
        assert cost.seconds.low == pytest.approx(sum(s.low for s in steps))
        assert cost.seconds.high == pytest.approx(sum(s.high for s in steps))
        assert 0 < cost.seconds.low <= cost.seconds.high
    assert predict(stage, WORKLOAD).seconds is None


@pytest.mark.quick
def test_a_temporary_is_fresh_from_the_allocators_threshold_on():
    shape = Shape([16], num_heads=1, num_kv_heads=1, head_size=16)  # K and V: 1,024 bytes each

    def fresh(threshold):
        steps = predict("single_tile", shape, replace(RICH, fresh_from=threshold)).steps
        return {step.label: step.fresh_bytes for step in steps if step.fresh_bytes}

    assert fresh(1024) == {"gather": 2048, "reorder": 1024}  # V's one block is in order already
    assert fresh(1025) == fresh(None) == {}


@pytest.mark.quick
def test_what_the_gpus_do_is_told_from_published_figures():
    """At 100,000 tokens the loops wait for operations, the padded bmm for bytes."""
    for chip in ("BI-V100", "H200"):
        seconds = {name: predict(name, WORKLOAD, PROFILES[chip]).seconds for name in STAGE_NAMES}
        assert seconds["naive_loops"].low > 2 * seconds["single_bmm"].high
        for end in ("low", "high"):  # the same device at either end of its band
            padded, fused = (getattr(seconds[n], end) for n in ("single_bmm", "fused_phase2"))
            assert padded > 3 * fused


# -- refusals --


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"seq_lens": [5, -1]}, "seq_lens holds -1"),
        ({"seq_lens": [2.5]}, "seq_lens holds 2.5"),
        ({"seq_lens": [True]}, "seq_lens holds True"),
        ({"seq_lens": 7}, "seq_lens=7"),
        ({"num_heads": 25}, "num_heads=25 must be a multiple of num_kv_heads=4"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_kv_heads": -4}, "num_kv_heads=-4"),
        ({"block_size": 0}, "block_size=0"),
        ({"partition_size": 0}, "partition_size=0"),
        ({"partition_size": 512.0}, "partition_size=512.0"),
        ({"head_size": 6}, "head_size=6 must be a multiple of 4"),
        ({"head_size": 6, "layout": "vllm"}, "head_size=6 must be a multiple of 4"),
        ({"layout": "HDN"}, "layout='HDN' must be one of vllm, HND, NHD"),
        ({"head_size": 12, "dtype": torch.bfloat16}, "head_size=12 must be a multiple of 8"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
    ],
)
def test_a_shape_that_no_stage_serves_is_refused_by_name_and_value(wrong, words):
    with pytest.raises(ValueError, match=words):
        Shape(**{"seq_lens": [5], **wrong})


@pytest.mark.quick
def test_unknown_names_and_empty_profiles_are_refused():
    with pytest.raises(
        ValueError, match="name='flash' must be one of naive_loops, .*paged_attention"
    ):
        predict("flash", WORKLOAD)
    with pytest.raises(ValueError, match="layout='NHD' must be \"vllm\" for the stage single_bmm"):
        predict("single_bmm", Shape([5], layout="NHD"))
    with pytest.raises(ValueError, match="'cpu' has no bandwidth"):
        predict("single_bmm", WORKLOAD, PROFILES["cpu"])
    with pytest.raises(ValueError, match="'half' has no op_cost"):
        predict("single_bmm", Shape([]), DeviceProfile("half", EXACT.bandwidth, None))


@pytest.mark.quick
def test_lengths_may_come_as_any_iterable_and_shapes_compare():
    assert Shape(range(3)) == Shape([0, 1, 2]) == Shape((0, 1, 2))
    assert hash(Shape([1])) == hash(Shape((1,)))
