"""Curves that a notebook draws from what it has just measured, against the floor.

Each function returns a Picture. Pictures of a whole run, which are redrawn from its
JSON, are in `paged_attention.bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch

from paged_attention.cost.predict import Cost
from paged_attention.measure.machine import device_name
from paged_attention.measure.profiles import DeviceProfile
from paged_attention.measure.profiles import Figure as Band
from paged_attention.measure.timing import Measurement
from paged_attention.measure.units import human_bytes, human_seconds
from paged_attention.measure.yardstick import Floor
from paged_attention.plots.canvas import legend_above, listed, new_panels
from paged_attention.plots.picture import Picture
from paged_attention.plots.style import (
    FLOOR_COLOUR,
    STAGE_COLOURS,
    Axes,
    Spread,
    caption,
    device_mark,
    log_axes,
    median_curve,
)

# Of kinds of operation and of named curves: Paul Tol's "muted", light and dark in turns. No stage
# has one of these colours.
KIND_COLOURS = ("#332288", "#DDCC77", "#CC6677", "#117733", "#88CCEE", "#BBBBBB")

Measured = Mapping[str, Mapping[int, Measurement]]  # {name: {tokens, or another x: Measurement}}


def draw_costs(
    measured: Measured,
    floors: Mapping[int, Floor],
    *,
    predicted: Mapping[str, Mapping[int, Band]],
    shape: str,
) -> Picture:
    """Time and memory of stages against length, log-log.

    Measurements are medians with quartiles, predictions are hollow. Dashed are the floor (time)
    and the bytes of K and V themselves (memory).

    Args:    measured: {stage: {tokens: Measurement}}
             floors: {tokens: Floor}
             predicted: {stage: {tokens: seconds, as `cost.predict` gives them}}
             shape: the workload, in words, for the caption
    """
    figure, (time, memory) = new_panels(9.0, 4.3, columns=2)
    first = next(iter(measured))
    for stage, by_tokens in measured.items():
        line: dict[str, Any] = {"color": STAGE_COLOURS[stage], "label": stage}
        if stage == first:  # drawn broad, so that it shows under another that equals it
            line |= {"linewidth": 5, "alpha": 0.55, "markersize": 9}
        else:
            line |= {"linewidth": 1.6, "markersize": 6}
        runs = {tokens: by_tokens[tokens] for tokens in floors}
        median_curve(time, _spreads(runs), **line)
        memory.plot(list(runs), [m.peak_bytes for m in runs.values()], "o-", **line)
    for stage, by_tokens in predicted.items():
        bands = [(by_tokens[tokens].low, by_tokens[tokens].high) for tokens in floors]
        low, high = numpy.transpose(bands)
        middle = numpy.sqrt(low * high)
        time.errorbar(
            list(floors), middle, yerr=[middle - low, high - middle], fmt="o:",
            color=STAGE_COLOURS[stage], markerfacecolor="none",
            markersize=9 if stage == first else 6, label=f"{stage}, predicted",
        )  # fmt: skip
    _draw_floors(time, floors, "floor: K and V read once")
    kv_bytes = [floor.num_bytes for floor in floors.values()]
    memory.plot(list(floors), kv_bytes, "--", color=FLOOR_COLOUR, label="K and V themselves")
    _finish(time, floors, "time a step", human_seconds)
    _finish(memory, floors, "peak memory of temporaries", human_bytes)
    legend = "Filled: medians; shaded: the middle half of samples. Hollow: predicted, as a band."
    caption(figure, [_where(_device_of(floors), shape), legend])
    alt = _in_words(measured, "Time and memory against length")
    return Picture(figure, alt)


def draw_floor(
    floors: Mapping[int, Floor], profiles: Mapping[str, DeviceProfile], *, bytes_per_token: int
) -> Picture:
    """The floor measured here, and what published bandwidths predict for other devices.

    Args:    floors: {tokens: Floor}
             profiles: {device: DeviceProfile}; one without a bandwidth is left out
             bytes_per_token: of K and V together
    """
    figure, [ax] = new_panels(8.0, 4.2)
    _draw_floors(ax, floors, f"measured here: {_device_of(floors)}")
    num_bytes = bytes_per_token * numpy.array(list(floors))
    for name, profile in profiles.items():
        if profile.bandwidth is None:
            continue
        slow, fast = num_bytes / profile.bandwidth.low, num_bytes / profile.bandwidth.high
        colour, _ = device_mark(name)
        ax.fill_between(list(floors), fast, slow, color=colour, alpha=0.25, linewidth=2)
        label = f"predicted: {name}, published bandwidth"
        ax.plot(list(floors), slow, ":", color=colour, label=label)
    _finish(ax, floors, "time to read K and V once", human_seconds)
    caption(figure, [f"torch {torch.__version__}; {bytes_per_token:,} bytes a token."])
    others = listed(name for name, profile in profiles.items() if profile.bandwidth)
    alt = f"Time to read K and V once against length, measured here and predicted for {others}."
    return Picture(figure, alt)


def draw_lines(
    measured: Measured, *, xlabel: str, device: str, shape: str, floor: Floor | None = None
) -> Picture:
    """Time against anything, log-log: a curve for each name, medians with quartiles.

    Args:    measured: {name: {x: Measurement}}
             xlabel: what x is
             device: where it was measured
             shape: the workload, in words, for the caption
             floor: drawn as a dashed line across; None for no line
    """
    figure, [ax] = new_panels(8.0, 3.8)
    for (name, runs), colour in zip(measured.items(), KIND_COLOURS[::2]):
        median_curve(ax, _spreads(runs), color=colour, label=name)
    if floor is not None:
        label = "floor: K and V read once"
        ax.axhline(floor.seconds, color=FLOOR_COLOUR, linestyle="--", label=label)
    _finish(ax, next(iter(measured.values())), "time a step", human_seconds)
    ax.set_xlabel(xlabel)
    caption(figure, [_where(device_name(device), shape)])
    alt = _in_words(measured, f"Time against {xlabel}")
    return Picture(figure, alt)


def draw_wave_sizes(
    predicted: Mapping[str, Mapping[int, Cost]],
    measured: Mapping[int, Measurement],
    *,
    device: str,
    shape: str,
) -> Picture:
    """Time and memory of a call against the size of its waves, log-log.

    Args:    predicted: {device: {MiB of a wave's K: Cost}}
             measured: {MiB of a wave's K: Measurement}, on `device`
             shape: the workload, in words, for the caption
    """
    figure, (time, memory) = new_panels(9.0, 4.3, columns=2)
    for name, costs in predicted.items():
        colour, mark = device_mark(name)
        ends = [(cost.seconds.low, cost.seconds.high) for cost in costs.values() if cost.seconds]
        low, high = numpy.transpose(ends)
        line: dict[str, Any] = {
            "color": colour,
            "markerfacecolor": "none",
            "label": f"{name}, predicted",
        }
        time.plot(list(costs), numpy.sqrt(low * high), f"{mark}:", **line)
        time.fill_between(list(costs), low, high, color=colour, alpha=0.12, linewidth=0)
        peaks = [cost.temporary_bytes for cost in costs.values()]  # the same on all devices
    median_curve(time, _spreads(measured), color="#000000", label="this machine, measured")
    memory.plot(list(measured), peaks, "o-", color="#000000", label="temporaries, counted")
    _finish(time, measured, "time a step", human_seconds)
    _finish(memory, measured, "peak memory of temporaries", human_bytes)
    for ax in (time, memory):
        ax.set_xlabel("MiB of a wave's K, as float32")
    caption(figure, [_where(device_name(device), shape), "Hollow: predicted, shaded as a band."])
    alt = _in_words({"measured": measured}, "Time and memory against the size of a wave")
    return Picture(figure, alt)


def draw_breakdown(
    breakdowns: Mapping[str, Mapping[str, float]], *, device: str, shape: str
) -> Picture:
    """Time inside operations, by kind: a stacked bar for each call.

    Args:    breakdowns: {name: {kind: seconds}}, each as `measure.breakdown` gives it
             device: where they were measured
             shape: the workload, in words, for the caption
    """
    figure, [ax] = new_panels(9.0, 0.5 * len(breakdowns) + 1.4)
    names, bars = list(breakdowns), list(breakdowns.values())
    lefts = [0.0] * len(bars)
    for kind, colour in zip(bars[0], KIND_COLOURS):
        widths = [1e3 * seconds[kind] for seconds in bars]
        ax.barh(names, widths, left=lefts, color=colour, height=0.7, label=kind)
        lefts = [left + width for left, width in zip(lefts, widths)]
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds inside operations")
    legend_above(ax, len(bars[0]))
    caption(figure, [_where(device_name(device), shape)])
    bars_in_words = (
        f"{name}: " + listed(f"{kind} {human_seconds(s)}" for kind, s in bar.items() if s)
        for name, bar in breakdowns.items()
    )
    alt = "Time inside operations, by kind, as stacked bars. " + "; ".join(bars_in_words) + "."
    return Picture(figure, alt)


def _device_of(floors: Mapping[int, Floor]) -> str:
    return device_name(next(iter(floors.values())).measurement.device)


def _where(device: str, shape: str) -> str:
    return f"{device}, torch {torch.__version__}; {shape}."


def _spreads(runs: Mapping[int, Measurement]) -> dict[int, Spread]:
    return {x: (m.seconds, m.spread) for x, m in runs.items()}


def _draw_floors(ax: Axes, floors: Mapping[int, Floor], label: str) -> None:
    seconds = [floor.seconds for floor in floors.values()]
    ax.plot(list(floors), seconds, "s--", markersize=4, color=FLOOR_COLOUR, label=label)


def _finish(ax: Axes, xs: Iterable[int], ylabel: str, in_words: Callable[[float], str]) -> None:
    log_axes(ax, list(xs), "tokens in the cache", ylabel, in_words)
    ax.legend(fontsize=8, frameon=False)


def _in_words(measured: Measured, what: str) -> str:
    """What a picture of curves says: each curve's ends."""
    ends = []
    for name, runs in measured.items():
        (x, first), (last_x, last) = list(runs.items())[0], list(runs.items())[-1]
        seconds = f"{human_seconds(first.seconds)} at {x:,}"
        ends.append(f"{name} {seconds}, {human_seconds(last.seconds)} at {last_x:,}")
    return f"{what}: " + "; ".join(ends) + "."
