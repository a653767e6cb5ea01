"""The scoreboard at the end of a notebook: a row for every stage so far, counted and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from paged_attention.cost import Cost, Shape, cost_of
from paged_attention.lesson.progress import shown
from paged_attention.measure import compare
from paged_attention.measure.timing import Measurement
from paged_attention.measure.units import human_seconds
from paged_attention.measure.yardstick import Floor
from paged_attention.stages import STAGES

Stages = Mapping[str, Callable[..., torch.Tensor]]
BUSY = 1.25  # quartiles further apart than this say that something else was running


def stages_before(name: str) -> dict[str, Callable[..., torch.Tensor]]:
    """The stages before one, in teaching order. All six for a name that is no stage's."""
    names = list(STAGES)
    return {n: STAGES[n] for n in names[: names.index(name) if name in STAGES else None]}


def costs(stages: Stages, tokens: int = 100_000) -> dict[str, Cost]:
    """What each stage costs at the series' workload, counted on tensors without data.

    Args:    stages: by name; functions with a stage's signature
             tokens: of the one sequence
    """
    inputs = Shape((tokens,)).inputs()
    return {
        name: cost_of(lambda stage=stage: stage(*inputs, 1 / 16))
        for name, stage in shown(list(stages.items()), "counting")
    }


def scoreboard(counted: Mapping[str, Cost]) -> None:
    """Print a row for each stage: operations, GEMMs, host reads, and bytes in MB.

    Args:    counted: by name, as `costs` gives them
    """
    print("stage           operations  GEMMs  host reads   read, MB  written, MB  peak, MB")
    for name, cost in counted.items():
        read, written, peak = (
            f"{num_bytes / 1e6:,.1f}"
            for num_bytes in (cost.bytes_read, cost.bytes_written, cost.temporary_bytes)
        )
        print(
            f"{name:15s}{cost.ops:11,}{cost.gemms:7,}{cost.host_reads:12,}"
            f"{read:>11s}{written:>13s}{peak:>10s}"
        )


def race(
    stages: Stages, lengths: Iterable[int], *, device: str, min_seconds: float = 0.25
) -> tuple[dict[str, dict[int, Measurement]], dict[int, Floor]]:
    """Measure stages in turns with each other and the floor, and print their times.

    Args:    stages, lengths, device, min_seconds: as for `measure.compare`
    Returns: measured: {stage: {length: Measurement}};  floors: {length: Floor}
    """
    measured: dict[str, dict[int, Measurement]] = {name: {} for name in stages}
    floors = {}
    for tokens in shown(lengths, "measuring"):
        timed, floor = compare(stages, [tokens], device=device, min_seconds=min_seconds)
        floors |= floor
        for name, by_length in timed.items():
            measured[name] |= by_length
    print("tokens  stage              median  (quartiles)            x floor")
    for tokens, floor in floors.items():
        for name, by_length in measured.items():
            m = by_length[tokens]
            times = f"{human_seconds(m.seconds):>9s}  {spread(m):22s}"
            print(f"{tokens:6,}  {name:15s} {times} {m.seconds / floor.seconds:6,.0f}")
    print(quietness(m for by_length in measured.values() for m in by_length.values()))
    return measured, floors


def spread(measurement: Measurement) -> str:
    """The quartiles in words.

    Returns: such as "(9.98 ms to 10.3 ms)"
    """
    low, high = measurement.spread
    return f"({human_seconds(low)} to {human_seconds(high)})"


def quietness(measurements: Iterable[Measurement]) -> str:
    """Whether the machine had something else to do, in a sentence."""
    apart = max((m.spread[1] / m.spread[0] for m in measurements), default=1.0)
    if apart < BUSY:
        return f"The machine was quiet: quartiles lie at most {apart - 1:.0%} apart."
    return (
        f"The machine was busy: quartiles lie up to {apart - 1:.0%} apart. "
        "Run this cell again when it is quiet."
    )
