"""Time and memory against the length of the sequence, drawn from a run's JSON dictionary."""

from __future__ import annotations

from typing import Any

import numpy

from paged_attention.bench.ladder import results_of
from paged_attention.bench.page import FLOOR_LINE, KV_LINE, page
from paged_attention.measure.units import human_bytes, human_seconds
from paged_attention.plots.style import FLOOR_COLOUR, Axes, Figure, log_axes, mark_of, median_curve

_NOTE = (
    "Medians, shaded the middle half of the samples; the floor is torch.mv reading as many bytes "
    "as K and V hold."
)


def draw_lengths(run: dict[str, Any]) -> Figure:
    """Time above, memory below: curves of every stage, the kernel, its peers and the floor.

    Args:    run: what `ladder` makes and ladder.json holds
    """
    steps = sorted(run["contexts"], key=lambda step: step["context"])
    tokens = [step["context"] for step in steps]
    with page(run, "One decode step of PagedAttention V2, against length", 7.6, [_NOTE]) as figure:
        time, memory = figure.subplots(2, 1, height_ratios=(1.6, 1))
        for name, timed in _timed_by_name(steps).items():
            colour, mark = mark_of(name)
            line: dict[str, Any] = {"color": colour, "ms": 5, "lw": 1.4, "label": name}
            seconds = {n: (result["seconds"], result["spread"]) for n, result in timed.items()}
            median_curve(time, seconds, f"{mark}-", **line)
            peaks = {n: result["peak_bytes"] for n, result in timed.items()}
            counted = [n for n in peaks if peaks[n]]
            if counted:
                memory.plot(counted, [peaks[n] for n in counted], f"{mark}-", **line)
        floors = {step["context"]: step["floor"]["seconds"] for step in steps if step["floor"]}
        time.plot([*floors], [*floors.values()], color=FLOOR_COLOUR, label="floor", **FLOOR_LINE)
        kv_bytes = [step["kv_bytes"] for step in steps]
        memory.plot(tokens, kv_bytes, color=FLOOR_COLOUR, label="K and V", **KV_LINE)
        log_axes(time, tokens, "", "time a step", human_seconds)
        log_axes(memory, tokens, "tokens in the cache", "peak memory", human_bytes)
        _legend(time)
        _legend(memory)
    return figure


def _timed_by_name(steps: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """{stage or peer: {tokens: result}}, of those that were timed."""
    timed: dict[str, dict[int, dict[str, Any]]] = {}
    for step in steps:
        for result in results_of(step):
            if "seconds" in result:
                timed.setdefault(result["name"], {})[step["context"]] = result
    return timed


def _legend(axes: Axes) -> None:
    """To the right of the curves, in the order in which they end."""
    lines = sorted(axes.lines, key=lambda line: -numpy.asarray(line.get_ydata())[-1])
    axes.legend(
        handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8.5
    )
