"""What an operation and a step cost, by the model's rules and by hand."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
import torch

from paged_attention.cost import NAMES, PROFILES, DeviceProfile, Figure, Shape, Step
from paged_attention.cost.predict import cost_of, predict
from paged_attention.cost.seconds import seconds_of
from paged_attention.measure.profiling import KINDS

quick = pytest.mark.quick
WORKLOAD = Shape([100_000])
EXACT = DeviceProfile("exact", Figure(2.0, 4.0, "B/s", ""), Figure(10.0, 30.0, "s", ""))
RICH = replace(
    EXACT,
    rearrange_bandwidth=Figure(1.0, 2.0, "B/s", ""),
    fresh_page_cost=Figure(5.0, 7.0, "s/B", ""),
    fresh_from=1000,
)


# -- bytes --

X, COLUMN = torch.ones(6, 5), torch.ones(6, 1)  # 120 and 24 bytes
IDS = torch.tensor([4, 0, 4])  # 24 bytes, for rows of 20
OTHERS = torch.ones(2, 5)


@quick
@pytest.mark.parametrize(
    "call, kind, read, written, rearranged",
    [
        (lambda: X.mul_(COLUMN), "softmax, merge", 144, 120, 0),
        (lambda: X @ X.t(), "GEMMs", 240, 144, 0),
        (lambda: X[IDS], "gather", 60 + 24, 60, 0),
        (lambda: torch.index_select(X, 0, IDS, out=torch.empty(3, 5)), "gather", 84, 60, 0),
        (lambda: X.t()[None].index_select(0, IDS[1:2]), "gather", 128, 120, 248),
        (lambda: X.index_copy_(0, IDS[:2], OTHERS), "copies", 16 + 40, 40, 0),
        (lambda: X.t().contiguous(), "copies", 120, 120, 240),
        (lambda: COLUMN.repeat_interleave(5, dim=1), "copies", 24, 120, 144),
        (lambda: X[:, :4].half(), "copies", 96, 48, 0),
        (lambda: torch.zeros_like(X), "fills", 0, 120, 0),
    ],
)
def test_bytes_of_one_operation(call, kind, read, written, rearranged):
    steps = [step for step in cost_of(call).steps if step.ops]
    got = [(s.label, s.ops, s.bytes_read, s.bytes_written, s.rearranged_bytes) for s in steps]
    assert got == [(kind, 1, read, written, rearranged)]


@quick
def test_a_view_costs_nothing():
    assert cost_of(lambda: X[1:, 1:].unsqueeze(0)).steps == ()


@quick
def test_bytes_of_a_hand_counted_step():
    """One token, one head of four lanes, one block of one slot, float32."""
    shape = Shape([1], num_heads=1, num_kv_heads=1, head_size=4, block_size=1, partition_size=1)
    cost = predict("single_tile", shape)
    assert {
        step.label: (step.ops, step.bytes_read, step.bytes_written) for step in cost.steps
    } == {
        "fills": (1, 0, 16),  # zeros
        "other": (1, 4, 0),  # the length, on the host
        "copies": (2, 4 + 16, 8 + 16),  # the id as int64; the result
        "gather": (2, 2 * (16 + 8), 2 * 16),  # K and V, each by the id
        "GEMMs": (2, (16 + 16) + (4 + 16), 4 + 16),
        "softmax, merge": (2, 16 + 4, 16 + 4),  # q times scale; softmax
    }
    assert cost.bytes_moved == (20 + 52 + 52 + 4 + 16) + (32 + 40 + 20 + 4 + 16)


@quick
def test_the_kernel_rearranges_in_the_vllm_layout_only():
    for layout in ("vllm", "HND", "NHD"):
        steps = predict("paged_attention", Shape([5000], layout=layout)).steps
        gather = next(step for step in steps if step.label == "gather")
        share = gather.rearranged_bytes / gather.bytes_moved
        assert share > 0.99 if layout == "vllm" else share == 0


@quick
def test_the_series_traffic_in_multiples_of_k_and_v():
    """15 for the loops, 17 for the gather, 26 for the padded bmm, under 7 without repeated heads,
    and 3 for the kernel. The rest is logits, queries and ids."""
    times = {name: predict(name, WORKLOAD).bytes_moved / WORKLOAD.kv_bytes for name in NAMES}
    assert WORKLOAD.kv_bytes == 819_200_000
    assert 15 < times["naive_loops"] < 15.2
    assert 17 < times["batched_gather"] < 17.2
    assert 26 < times["single_bmm"] < 26.3
    assert times["gqa_broadcast"] == times["single_tile"]
    assert 6.5 < times["fused_phase2"] < 6.75
    assert 3.0 < times["paged_attention"] < 3.15


# -- seconds --


@quick
def test_seconds_are_ops_times_their_cost_plus_bytes_over_bandwidth():
    step = Step("any", ops=3, bytes_read=40, bytes_written=8, rearranged_bytes=16, fresh_bytes=2)
    plain, rich = seconds_of([step], EXACT), seconds_of([step], RICH)
    assert (plain.low, plain.high, plain.unit) == (3 * 10 + 48 / 4, 3 * 30 + 48 / 2, "s")
    assert (rich.low, rich.high) == (30 + 32 / 4 + 16 / 2 + 2 * 5, 90 + 32 / 2 + 16 / 1 + 2 * 7)
    assert "exact" in plain.source


@quick
def test_a_gather_a_product_a_copy_and_the_rest_move_at_their_own_bandwidths():
    rates = {"gather_bandwidth": 10.0, "gemm_bandwidth": 100.0, "rearrange_bandwidth": 0.5}
    figures = {name: Figure(rate, 2 * rate, "B/s", "") for name, rate in rates.items()}
    profile = replace(EXACT, op_cost=Figure(0.0, 0.0, "s", ""), **figures)
    for label, rate in (("gather", 10), ("GEMMs", 100), ("copies", 2), ("other", 2)):
        step = Step(label, ops=1, bytes_read=70, bytes_written=40, rearranged_bytes=10)
        assert seconds_of([step], profile).high == 100 / rate + 10 / 0.5
        assert seconds_of([step], profile).low == seconds_of([step], profile).high / 2


@quick
def test_where_a_device_works_beside_its_host_the_longer_of_the_two_decides():
    launch, read = Figure(1.0, 2.0, "s", ""), Figure(5.0, 6.0, "s", "")
    gpu = replace(EXACT, launch=launch, host_read=read)
    small, large = Step("gather", ops=2, host_reads=1, bytes_read=4), Step("copies", 1, 0, 0, 400)
    both = small, large
    assert seconds_of([small], gpu).high == 2 * 30 + 6  # the host; the device: 2 * 2 + 4 / 2
    assert seconds_of([large], gpu).high == 2 + 400 / 2  # the device; the host: 30
    assert seconds_of(both, gpu).high == 3 * 2 + 404 / 2 == 208  # 3 * 30 + 6 are hidden
    assert seconds_of(both, gpu).low == 3 * 1 + 404 / 4
    assert seconds_of(both, EXACT).high == 3 * 30 + 404 / 2  # host and device are one


@quick
@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_a_call_costs_the_sum_of_its_steps_which_are_breakdowns_kinds(name):
    assert predict(name, WORKLOAD).seconds is None
    for profile in (EXACT, RICH):
        cost = predict(name, Shape([700, 3]), profile)
        sums = [sum(column) for column in zip(*(astuple(step)[1:6] for step in cost.steps))]
        assert sums == [cost.ops, cost.gemms, cost.host_reads, cost.bytes_read, cost.bytes_written]
        seconds = [seconds_of([step], profile) for step in cost.steps]
        assert cost.seconds.low == pytest.approx(sum(s.low for s in seconds))
        assert cost.seconds.high == pytest.approx(sum(s.high for s in seconds))
        assert {step.label for step in cost.steps} <= set(KINDS)


@quick
def test_a_temporary_is_fresh_from_the_allocators_threshold_on():
    shape = Shape([16], num_heads=1, num_kv_heads=1, head_size=16)  # K and V: 1,024 bytes each

    def fresh(threshold):
        steps = predict("single_tile", shape, replace(RICH, fresh_from=threshold)).steps
        return {step.label: step.fresh_bytes for step in steps if step.fresh_bytes}

    assert fresh(1024) == {"gather": 2048, "copies": 1024}  # V's one block is in order already
    assert fresh(1025) == fresh(None) == {}


# -- refusals --


@quick
@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ({"seq_lens": [5, -1]}, ValueError, "seq_lens.1. must be at least 0, .* got -1"),
        ({"num_heads": 25}, ValueError, "num_heads must be a multiple of num_kv_heads, 4, got 25"),
        ({"partition_size": 512.0}, TypeError, "partition_size must be a whole number, got 512.0"),
        ({"head_size": 6}, ValueError, "head_size must be a multiple of 4 .* got 6"),
        ({"layout": "HDN"}, ValueError, "layout must be one of .* got 'HDN'"),
        ({"dtype": torch.float64}, ValueError, "dtype must be float32, .* got torch.float64"),
    ],
)
def test_a_shape_that_no_stage_serves_is_refused_by_name_and_value(wrong, error, words):
    with pytest.raises(error, match=words):
        Shape(**{"seq_lens": [5], **wrong})


@quick
def test_unknown_names_and_empty_profiles_are_refused():
    with pytest.raises(ValueError, match="must be one of naive_loops, .*paged_attention, got 'fl"):
        predict("flash", WORKLOAD)
    with pytest.raises(ValueError, match="layout must be \"vllm\" for a stage, got 'NHD'"):
        predict("single_bmm", Shape([5], layout="NHD"))
    with pytest.raises(ValueError, match="'cpu' has no bandwidth"):
        predict("single_bmm", WORKLOAD, PROFILES["cpu"])
    with pytest.raises(ValueError, match="'half' has no op_cost"):
        predict("single_bmm", Shape([]), DeviceProfile("half", EXACT.bandwidth, None))


@quick
def test_lengths_may_come_as_any_iterable_and_shapes_compare():
    assert Shape(range(3)) == Shape([0, 1, 2]) == Shape((0, 1, 2))
    assert hash(Shape([1])) == hash(Shape((1,)))
