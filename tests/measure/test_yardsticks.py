"""What times are held to: the floor of a read, and a profile of this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paged_attention import measure as m
from paged_attention.measure import calibration
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import PROFILES

quick = pytest.mark.quick


@quick
def test_the_floor_reads_at_least_the_bytes_asked_for_with_two_products():
    floor = m.floor(5 * 16384 + 1, min_seconds=0.01)
    assert floor.num_bytes == 6 * 16384  # whole rows of 4,096 numbers, as many for K as for V
    assert floor.measurement.gemms == floor.measurement.ops == 2
    assert floor.gb_per_second * floor.seconds * 1e9 == pytest.approx(floor.num_bytes)
    reader = m.FloorReader(6 * 16384)
    assert reader.key.nbytes + reader.value.nbytes == reader.num_bytes == 6 * 16384
    reader.value.mul_(2)  # both are read
    assert [x.tolist() for x in reader()] == [[4096.0] * 3, [8192.0] * 3]
    with pytest.raises(ValueError, match="num_bytes=0"):
        m.floor(0)


@quick
def test_kv_bytes_of_the_workload():
    assert m.kv_bytes(100_000, 4, 256) == 819_200_000
    assert m.kv_bytes(100_000, 4, 256, torch.bfloat16) == 409_600_000


def test_calibrate_measures_a_profile(monkeypatch):
    once = {"min_seconds": 0.0, "rounds": 1}
    monkeypatch.setattr(calibration, "interleaved", lambda fns, **_: m.interleaved(fns, **once))
    profile = m.calibrate("cpu")
    assert profile.name == m.device_name("cpu") != ""
    assert 1e8 < profile.bandwidth.low <= profile.bandwidth.high < 1e13  # bytes per second
    assert 1e-8 < profile.op_cost.low <= profile.op_cost.high < 1.0
    assert profile.num_sms is None
    rearrange, fresh = profile.rearrange_bandwidth, profile.fresh_page_cost
    assert 1e7 < rearrange.low <= rearrange.high < 1e13
    assert 0 <= fresh.low <= fresh.high < 1e-6  # seconds per byte
    assert profile.fresh_from == 32 * 2**20


@quick
def test_a_profile_follows_from_what_was_timed(monkeypatch):
    """Bytes over seconds, seconds over operations; the fast end of a band is its quartile's."""
    spreads = {"read": (0.5, 2.0), "ops": (4.0, 8.0), "rearrange": (3, 5)}
    medians = {"rearrange": 4.0, "rearrange afresh": 18.0, "fill": 1.0, "fill afresh": 3.0}
    ran = {}

    def timed(fns, **_):
        ran.update(fns)
        return {
            name: SimpleNamespace(spread=spreads.get(name), seconds=medians.get(name))
            for name in fns
        }

    monkeypatch.setattr(calibration, "interleaved", timed)
    profile = m.calibrate("cpu")
    blocks = 80 * 2**20
    assert (profile.bandwidth.low, profile.bandwidth.high) == (2**27, 2**29)
    assert (profile.op_cost.low, profile.op_cost.high) == (1.0, 2.0)
    assert profile.rearrange_bandwidth.low == 4 * blocks / 5  # K and V, each read and written
    assert profile.rearrange_bandwidth.high == 4 * blocks / 3
    assert profile.fresh_page_cost.low == (3 - 1) / blocks
    assert profile.fresh_page_cost.high == (18 - 4) / (2 * blocks)
    medians["rearrange afresh"] = 2.0  # noise: no page costs less than nothing
    assert m.calibrate("cpu").fresh_page_cost.low == 0
    assert profile.wave_bytes == PROFILES["cpu"].wave_bytes

    assert count(ran["ops"]).ops == 4
    assert count(ran["rearrange"]).by_op == {"copy_": 2}
    assert count(ran["rearrange"]).peak_bytes == 0
    assert count(ran["rearrange afresh"]).peak_bytes == blocks  # one at a time
    assert count(ran["fill"]).peak_bytes == 0
    assert count(ran["fill afresh"]).peak_bytes == blocks
