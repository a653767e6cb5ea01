"""What the ladder's stages would take on devices that nobody has measured yet."""

from __future__ import annotations

from . import cost
from .device import PROFILES
from .machine import device_slug


def predictions(settings, context: int) -> dict[str, dict[str, list[float]]]:
    """The stages' times by the published profiles, for the device that is measured left out.

    Args:    settings: ladder.Settings
             context: tokens
    Returns: {device: {stage: [low, high]}}, seconds; what `cost` has no model of isn't there
    """
    shape = cost.Shape(
        [context],
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_size=settings.head_size,
        block_size=settings.block_size,
        partition_size=settings.partition_size,
        dtype=settings.dtype,
    )
    here = device_slug(settings.device)
    predicted = {}
    for device, profile in PROFILES.items():
        if None in (profile.bandwidth, profile.op_cost) or device.lower() == here:
            continue
        predicted[device] = {}
        for name in settings.stages:
            if name in cost.STAGE_COSTS:
                band = cost.predict(name, shape, profile).seconds
                predicted[device][name] = [round(band.low, 9), round(band.high, 9)]
    return predicted
