"""Stages side by side at several lengths: what a notebook measures and draws.

A whole run, at lengths that take minutes, is `python -m paged_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from paged_attention.inputs import random_inputs
from paged_attention.measure.synchronization import Device
from paged_attention.measure.timing import Measurement, interleaved
from paged_attention.measure.yardstick import Floor, FloorReader, kv_bytes


def compare(
    stages: Mapping[str, Callable[..., torch.Tensor]],
    lengths: Iterable[int],
    *,
    device: Device = "cpu",
    num_heads: int = 24,
    num_kv_heads: int = 4,
    head_size: int = 256,
    min_seconds: float = 0.25,
) -> tuple[dict[str, dict[int, Measurement]], dict[int, Floor]]:
    """Measure stages on one sequence of each length, in turns with each other and the floor.

    Args:    stages: by name; functions with a stage's signature
             lengths: tokens
             device, num_heads, num_kv_heads, head_size: as for `random_inputs`
             min_seconds: of sampling for each stage at each length, at least
    Returns: measured: {stage: {length: Measurement}};  floors: {length: Floor}
    Raises:  as `interleaved`; ValueError: a stage called "floor"
    """
    if "floor" in stages:
        raise ValueError('stages may hold no "floor": that is what they are compared with')
    measured: dict[str, dict[int, Measurement]] = {name: {} for name in stages}
    floors = {}
    for tokens in lengths:
        inputs = random_inputs(
            [tokens], num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
            device=device,
        )  # fmt: skip
        read = FloorReader(kv_bytes(tokens, num_kv_heads, head_size), device=device)
        calls = {
            name: lambda stage=stage, inputs=inputs: stage(*inputs, head_size**-0.5)
            for name, stage in stages.items()
        }
        timed = interleaved({"floor": read, **calls}, device=device, min_seconds=min_seconds)
        floors[tokens] = Floor(timed.pop("floor"), read.num_bytes)
        for name, measurement in timed.items():
            measured[name][tokens] = measurement
    return measured, floors
