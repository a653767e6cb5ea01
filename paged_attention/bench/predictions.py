"""What stands beside a measured step: what the model says, and what others published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_attention.bench.peers import PEERS
from paged_attention.bench.settings import Settings
from paged_attention.cost.predict import Shape, predict
from paged_attention.measure.machine import device_slug
from paged_attention.measure.profiles import PROFILES, DeviceProfile

Bands = dict[str, list[float]]  # {name: [low, high]}, seconds
PUBLISHED = Path(__file__).parents[2] / "figures" / "published.json"  # in a checkout of ours


def predictions(settings: Settings, seq_lens: Sequence[int]) -> dict[str, Bands]:
    """Times of the stages and the kernel by the published profiles of other devices.

    Args:    settings: the sizes, and which stages
             seq_lens: tokens of each sequence
    Returns: {device: {stage: [low, high]}}, seconds, without the device that is measured. Under
             "floor" a device has the time in which it can read K and V once
    """
    here = device_slug(settings.device)
    shapes = {name: settings.shape(name, seq_lens) for name in settings.stages}
    num_bytes = settings.kv_bytes(sum(seq_lens))
    predicted: dict[str, Bands] = {}
    for device, profile in PROFILES.items():
        if profile.bandwidth is not None and device.lower() != here:
            bands = {name: _band(name, shape, profile) for name, shape in shapes.items()}
            rates = profile.bandwidth.high, profile.bandwidth.low
            predicted[device] = {
                "floor": [float(f"{num_bytes / rate:.4g}") for rate in rates],
                **bands,
            }
    return predicted


def published(settings: Settings, seq_lens: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of published.json that did the same work for each KV head.

    That is, for one sequence of as many tokens, and as many query heads on a KV head of the same
    size. They may have had fewer KV heads, and another dtype. A row says so.
    """

    def work(row: dict[str, Any]) -> tuple[int, ...]:
        return row["tokens"], row["head_size"], row["num_heads"] // row["num_kv_heads"]

    if len(seq_lens) != 1 or not PUBLISHED.exists():
        return []
    ours = work({"tokens": seq_lens[0], **settings.sizes})
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["num_seqs"] == 1 and work(row) == ours]


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
