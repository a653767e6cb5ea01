"""What the cost model makes of the ladder: on this device, and on those nobody measured yet."""

from __future__ import annotations

from collections.abc import Sequence

from paged_attention.bench.peers.ours_and_sdpa import PEERS
from paged_attention.cost.predict import Shape, predict
from paged_attention.measure.machine import device_slug
from paged_attention.measure.profiles import PROFILES, DeviceProfile

Bands = dict[str, list[float]]  # name -> [low, high], seconds


def predictions(settings, seq_lens: Sequence[int]) -> dict[str, Bands]:
    """The stages' and the kernel's times by the published profiles, for the device that is
    measured left out.

    Args:    settings: settings.Settings
             seq_lens: tokens of each sequence
    Returns: {device: {stage: [low, high]}}, seconds
    """
    here = device_slug(settings.device)
    return {
        device: {
            name: _band(name, settings.shape(name, seq_lens), profile) for name in settings.stages
        }
        for device, profile in PROFILES.items()
        if None not in (profile.bandwidth, profile.op_cost) and device.lower() != here
    }


def predictions_here(settings, seq_lens: Sequence[int], profile: DeviceProfile) -> Bands:
    """The times of stages, of the kernel, and of the kernel in other layouts among the peers.

    Args:    settings, seq_lens: as above
             profile: of the device that is measured, from `measure.calibrate`
    Returns: {stage or peer: [low, high]}, seconds
    """
    shapes = {name: (name, settings.shape(name, seq_lens)) for name in settings.stages}
    for name in settings.peers:
        layout = PEERS[name].layout
        if layout is not None:
            kernel = "paged_attention"
            shapes[name] = kernel, settings.shape(kernel, seq_lens, layout)
    return {name: _band(*of, profile) for name, of in shapes.items()}


def _band(name: str, shape: Shape, profile: DeviceProfile) -> list[float]:
    seconds = predict(name, shape, profile).seconds
    return [round(seconds.low, 9), round(seconds.high, 9)]
