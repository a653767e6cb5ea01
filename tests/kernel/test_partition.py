"""How a batch is cut, in integers: every token once, nobody's cut anybody else's business."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_attention.kernel.device import MOST_MEMORY, accelerator_wave, wave_bytes
from paged_attention.kernel.partition import (
    even_shares,
    waves,
    whole_blocks,
    work_items,
)
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.shape import StepShape
from paged_attention.measure.profiles import PROFILES, profile_of

pytestmark = pytest.mark.quick

lengths = st.lists(st.integers(0, 5000), max_size=8)
sizes = st.tuples(st.integers(1, 2000), st.sampled_from([1, 3, 8, 16, 100]))


@given(lens=lengths, size=sizes)
def test_partitions_cover_each_sequence_exactly_in_whole_blocks(lens, size):
    block_size = size[1]
    partition_size = whole_blocks(*size)
    items = work_items(lens, partition_size, block_size)
    for seq, seq_len in enumerate(lens):
        mine = [item for item in items if item.seq == seq]
        end = 0
        for item in mine:
            assert item.start == end and item.width % block_size == 0
            assert 0 < item.width <= partition_size
            end = item.start + item.width
        assert 0 <= end - seq_len < block_size  # none at all for an empty one
        assert all(item.width == partition_size for item in mine[:-1])


@given(lens=lengths, size=sizes)
def test_a_sequence_is_cut_as_if_it_were_alone(lens, size):
    partition_size, block_size = whole_blocks(*size), size[1]
    items = work_items(lens, partition_size, block_size)
    for seq, seq_len in enumerate(lens):
        alone = work_items([seq_len], partition_size, block_size)
        assert [i[1:] for i in items if i.seq == seq] == [i[1:] for i in alone]


@given(lens=lengths, size=sizes, wave_tokens=st.integers(1, 10_000))
def test_waves_hold_every_item_once_of_one_width_and_within_the_budget(lens, size, wave_tokens):
    items = work_items(lens, whole_blocks(*size), size[1])
    cut = waves(items, wave_tokens)
    assert sorted(item for wave in cut for item in wave) == items
    for wave in cut:
        assert len({item.width for item in wave}) == 1
        assert len(wave) == 1 or len(wave) * wave[0].width <= wave_tokens


def test_a_wave_is_never_larger_than_its_budget_because_waves_are_even():
    items = work_items([18], 6, 6)  # three items, of which a budget of 10 allows one at a time
    assert [len(wave) for wave in waves(items, 10)] == [1, 1, 1]


@given(tiles=st.integers(0, 500), workers=st.integers(1, 200))
def test_shares_are_even(tiles, workers):
    shares = even_shares(tiles, workers)
    assert [tile for first, end in shares for tile in range(first, end)] == list(range(tiles))
    assert len(shares) == min(tiles, workers)
    counts = [end - first for first, end in shares]
    assert counts == sorted(counts, reverse=True) and max(counts, default=0) - 1 <= min(
        counts, default=0
    )


def test_a_gpus_wave_takes_its_share_of_the_memory_and_no_more_than_the_most():
    assert accelerator_wave(1_000_000_000) == 10_000_000  # half of a fiftieth
    assert accelerator_wave(34_057_748_480) == MOST_MEMORY // 2
    for name in ("BI-V100", "H200"):
        assert PROFILES[name].wave_bytes == MOST_MEMORY // 2
    assert PROFILES["cpu"].wave_bytes == 2048 * 4 * 256 * 4
    assert profile_of("cpu") is profile_of("meta") is PROFILES["cpu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("heads", [(24, 4, 256), (6, 1, 256), (32, 8, 128), (32, 32, 128)])
def test_a_workspace_on_a_gpu_is_small_however_long_the_sequence_is(heads, dtype):
    """Only the states and the block ids grow, by less than 1 % of K and V."""
    num_heads, num_kv_heads, head_size = heads
    shape = StepShape(num_heads, num_kv_heads, head_size, 16, dtype, 1, None)
    where = shape, "HND", torch.device("meta")
    for tokens in (100_000, 1_000_000):
        plan = DecodePlan.exact(*where, [tokens], wave_budget=PROFILES["BI-V100"].wave_bytes)
        kv_bytes = 2 * tokens * num_kv_heads * head_size * dtype.itemsize
        assert plan.workspace_bytes < MOST_MEMORY + 0.02 * kv_bytes


def test_a_partition_of_many_query_rows_keeps_the_budget_of_its_logits():
    """A default partition is no wider than a wave, whose logits take no more than its K may."""
    shape = StepShape(32, 1, 64, 16, torch.float32, 200, None)  # 6,400 rows, K has 64 floats
    plan = DecodePlan.exact(shape, "HND", torch.device("meta"), [5000], wave_budget=2**20)
    logits = shape.num_rows * plan.schedule.extent.wave_tokens
    assert plan.partition_size == 48  # 40 tokens in whole blocks
    assert 4 * logits <= 2**20 + 4 * shape.num_rows * shape.block_size


@pytest.mark.parametrize(
    "properties, peak",
    [({}, 1e12), ({"memory_clock_rate": 1_000_000, "memory_bus_width": 256}, 64e9)],
)
def test_a_cards_bandwidth_is_read_from_cudas_properties(monkeypatch, properties, peak):
    card = SimpleNamespace(total_memory=8_000_000_000, **properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    profile = profile_of("cuda:0")
    assert profile.bandwidth.high == peak and profile.name == "A card"
    assert wave_bytes.__wrapped__(torch.device("cuda:0")) == profile.wave_bytes == 80_000_000
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert profile_of("cuda:0") is PROFILES["H200"]
