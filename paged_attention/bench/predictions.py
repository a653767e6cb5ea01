"""What the cost model says of a step: on this device, and on those that nobody measured yet."""

from __future__ import annotations

from collections.abc import Sequence

from paged_attention.bench.peers import PEERS
from paged_attention.bench.settings import Settings
from paged_attention.cost.predict import Shape, predict
from paged_attention.measure.machine import device_slug
from paged_attention.measure.profiles import PROFILES, DeviceProfile

Bands = dict[str, list[float]]  # {name: [low, high]}, seconds


def predictions(settings: Settings, seq_lens: Sequence[int]) -> dict[str, Bands]:
    """Times of the stages and the kernel by the published profiles of other devices.

    Args:    settings: the sizes, and which stages
             seq_lens: tokens of each sequence
    Returns: {device: {stage: [low, high]}}, seconds, without the device that is measured
    """
    here = device_slug(settings.device)
    shapes = {name: settings.shape(name, seq_lens) for name in settings.stages}
    return {
        device: {name: _band(name, shape, profile) for name, shape in shapes.items()}
        for device, profile in PROFILES.items()
        if None not in (profile.bandwidth, profile.op_cost) and device.lower() != here
    }


def predictions_here(settings: Settings, seq_lens: Sequence[int], profile: DeviceProfile) -> Bands:
    """Times of the stages, the kernel, and the peers that are our kernel in other layouts.

    Args:    settings, seq_lens: as above
             profile: of the device that is measured, from `measure.calibrate`
    Returns: {stage or peer: [low, high]}, seconds
    """
    bands = {
        name: _band(name, settings.shape(name, seq_lens), profile) for name in settings.stages
    }
    kernel = "paged_attention"
    for name in settings.peers:
        layout = PEERS[name].layout
        if layout is not None:
            bands[name] = _band(kernel, settings.shape(kernel, seq_lens, layout), profile)
    return bands


def _band(name: str, shape: Shape, profile: DeviceProfile) -> list[float]:
    seconds = predict(name, shape, profile).seconds
    assert seconds is not None  # the profile has what they are made of
    return [round(seconds.low, 9), round(seconds.high, 9)]
