"""The three pictures that every notebook has, each in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paged_attention.cost import PROFILES, DeviceProfile, Shape, parts_of, predict, way_of
from paged_attention.measure.timing import Measurement
from paged_attention.plots import Picture, draw_explained, draw_verdict, draw_way, explained, tell

Stage = Callable[..., torch.Tensor]
WORKLOAD = "24 query heads, 4 KV heads of 256, float32"


def draw_way_of(stage: Stage, *, before: Stage | None = None, tokens: int = 100_000) -> Picture:
    """The data's way through a stage at the series' workload, counted.

    Args:    stage: a function with a stage's signature
             before: the stage that it is compared with; what moves other bytes is drawn in colour
             tokens: of the one sequence
    """
    shape = Shape((tokens,))
    inputs = shape.inputs()
    caches = inputs.key_cache, inputs.value_cache
    ways = [way_of(lambda s=s: s(*inputs, 1 / 16), *caches) for s in (stage, before) if s]
    return draw_way(ways[0], shape.kv_bytes, before=ways[1] if before else None)


def draw_explanation(
    measured: Mapping[str, Mapping[int, Measurement]], tokens: int, profile: DeviceProfile
) -> Picture:
    """What the times are made of, as bars; the same in numbers is printed.

    Args:    measured: {stage: {tokens: Measurement}}, as `race` gives it; "paged_attention" is the
                   kernel
             tokens: which of the lengths
             profile: of this machine, from `measure.calibrate`
    """
    shape = Shape((tokens,))
    parts = {name: parts_of(predict(name, shape, profile).steps, profile) for name in measured}
    bars = explained({name: runs[tokens].seconds for name, runs in measured.items()}, parts)
    tell(bars)
    return draw_explained(bars, caption=f"{profile.name}; {tokens:,} tokens, {WORKLOAD}")


def draw_device_verdict(
    measured: Mapping[str, Mapping[int, Measurement]],
    profile: DeviceProfile,
    first: str,
    second: str,
) -> Picture:
    """Where the second stage is faster than the first: measured here, predicted elsewhere.

    Args:    measured: {stage: {tokens: Measurement}}, as `race` gives it
             profile: of this machine, from `measure.calibrate`
             first, second: names of two of the stages, or "paged_attention" for the kernel
    """
    lengths = list(measured[first])

    def pairs(on: DeviceProfile) -> dict:
        return {n: tuple(_seconds(name, n, on) for name in (first, second)) for n in lengths}

    devices = {"here": profile, "BI-V100": PROFILES["BI-V100"], "H200": PROFILES["H200"]}
    predicted = {name: pairs(on) for name, on in devices.items()}
    both = {n: (measured[first][n], measured[second][n]) for n in lengths}
    return draw_verdict(both, predicted, (first, second))


def _seconds(name: str, tokens: int, profile: DeviceProfile):
    seconds = predict(name, Shape((tokens,)), profile).seconds
    assert seconds is not None  # there is a profile
    return seconds
