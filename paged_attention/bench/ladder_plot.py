"""The ladder's picture: every contender's time and memory, drawn from a run's JSON dictionary."""

from __future__ import annotations

import math
from typing import Any

from paged_attention.bench.captions import busy, rate
from paged_attention.bench.ladder import results_of
from paged_attention.bench.page import FLOOR_LINE, KV_LINE, page
from paged_attention.measure.units import human_bytes, human_seconds, ratio
from paged_attention.plots.style import FLOOR_COLOUR, Axes, Figure, device_mark, mark_of

_MOST_STEPS = 3  # as many as a page shows
_SPACE = 0.5  # rows of it below the stages, and below the peers
_MEASURED = (
    "Dots are medians, bars the middle half of the samples; the floor is torch.mv reading as many "
    "bytes as K and V hold."
)
_PREDICTED = (
    "Hollow marks are what the cost model makes of published figures, from the best of them to "
    "the worst. A dotted line is the floor of the device in its colour, at its best bandwidth."
)


def draw_ladder(run: dict[str, Any]) -> Figure:
    """A row of panels for each context: time on the left, memory on the right.

    Of more than three contexts it shows the shortest and the longest. `draw_lengths` has them all.

    Args:    run: what `ladder` makes and ladder.json holds
    """
    steps = run["contexts"]
    if len(steps) > _MOST_STEPS:
        steps = sorted(steps, key=lambda step: step["context"])[:: len(steps) - 1]
    heights = [0.75 + 0.29 * (1 + _last_row(step)) if results_of(step) else 1.0 for step in steps]
    devices = sorted({device for step in steps for device in step.get("predicted", {})})
    busiest = max(steps, key=lambda step: step["other_cores"] or 0.0)
    notes = [_MEASURED, *([_PREDICTED] if devices else []), *_sources(steps), *busy(busiest)]
    title = "One decode step of PagedAttention V2, stage by stage"
    with page(run, title, sum(heights) + 1.2, notes) as figure:
        figure.set_layout_engine("constrained", wspace=0.04)
        if devices:
            _explain_predictions(figure, devices)
        panels = figure.subplots(
            len(steps), 2, squeeze=False, height_ratios=heights, width_ratios=(2.6, 1)
        )
        for (time, memory), step in zip(panels, steps):
            _draw_times(time, step)
            _draw_memory(memory, step)
    return figure


def _rows(step: dict[str, Any]) -> dict[float, dict[str, Any]]:
    """{row: result}, counted from the top; peers stand further below, and published rows last."""
    below = len(step["stages"]), len(results_of(step))
    return {
        place + _SPACE * sum(place >= first for first in below): result
        for place, result in enumerate(results_of(step) + step.get("published", []))
    }


def _last_row(step: dict[str, Any]) -> float:
    return max(_rows(step), default=0)


def _draw_times(axes: Axes, step: dict[str, Any]) -> None:
    rows = _rows(step)
    floor = step["floor"]["seconds"] if step["floor"] else None
    low, high = _range_of_times(step)
    for device, bands in step.get("predicted", {}).items():
        if "floor" in bands:
            axes.axvline(
                bands["floor"][0], color=device_mark(device)[0], lw=1.2, ls=":", zorder=0.5
            )
    for row, result in rows.items():
        if "us" in result:
            _draw_published(axes, row, result)
            continue
        right = low
        for device, band in _predicted(step, result["name"]):
            _draw_prediction(axes, row, device, band)
            right = max(right, band[1])
        if "seconds" in result:
            _draw_time(axes, row, result, floor, right)
        else:
            _label(axes, right, row, _why_not(result), color=FLOOR_COLOUR, style="italic")
    axes.set_title(f"{step['context']:,} tokens")
    if floor:
        axes.axvline(floor, color=FLOOR_COLOUR, zorder=0.5, **FLOOR_LINE)
        axes.set_title(
            f"dashed: the floor, {human_seconds(floor)} at {rate(step['floor'])}",
            loc="right", fontsize=9, fontweight="normal", color="#333333",
        )  # fmt: skip
    _set_time_axis(axes, low, high)
    names = [r["name"] if "name" in r else f"{r['device']}, published" for r in rows.values()]
    axes.set_yticks(list(rows), names)
    axes.set_ylim(_last_row(step) + 0.6, -0.6)


def _range_of_times(step: dict[str, Any]) -> tuple[float, float]:
    times = [step["floor"]["seconds"]] if step["floor"] else []
    times += [1e-6 * row["us"] for row in step.get("published", [])]
    times += [
        bands["floor"][0] for bands in step.get("predicted", {}).values() if "floor" in bands
    ]
    for result in results_of(step):
        if "seconds" in result:
            times += [result["seconds"], result["spread"][0]]
        for _, band in _predicted(step, result["name"]):
            times += band
    return (min(times), max(times)) if times else (1e-3, 1.0)


def _predicted(step: dict[str, Any], name: str) -> list[tuple[str, list[float]]]:
    """[(device, [low, high]), ...] of a stage; none for a peer."""
    by_device = step.get("predicted", {})
    return [(device, bands[name]) for device, bands in by_device.items() if name in bands]


def _draw_time(
    axes: Axes, row: float, result: dict[str, Any], floor: float | None, right: float
) -> None:
    """A dot, a bar between the quartiles, a line to the floor, and words right of them all."""
    colour, mark = mark_of(result["name"])
    seconds, spread = result["seconds"], result["spread"]
    words = human_seconds(seconds)
    if floor:
        axes.hlines(row, floor, seconds, color=colour, lw=1, alpha=0.45)
        words += f"  {ratio(seconds / floor)}x floor"
    axes.plot(spread, [row, row], color=colour, lw=5, alpha=0.5, solid_capstyle="butt")
    axes.plot(seconds, row, mark, color=colour, ms=7)
    _label(axes, max(seconds, spread[1], floor or 0.0, right), row, words)


def _hollow_mark(device: str) -> dict[str, Any]:
    colour, mark = device_mark(device)
    return {"marker": mark, "mec": colour, "mfc": "white", "mew": 1.2, "ms": 5}


def _draw_prediction(axes: Axes, row: float, device: str, band: list[float]) -> None:
    """A bar from low to high, and a hollow mark in its middle."""
    colour, _ = device_mark(device)
    axes.plot(band, [row, row], color=colour, lw=1.2, solid_capstyle="butt")
    axes.plot(math.sqrt(band[0] * band[1]), row, ls="", **_hollow_mark(device))


def _draw_published(axes: Axes, row: float, published: dict[str, Any]) -> None:
    """A filled star, and what was timed."""
    seconds, (colour, _) = 1e-6 * published["us"], device_mark(published["device"])
    axes.plot(seconds, row, "*", color=colour, ms=10)
    _label(axes, seconds, row, f"{human_seconds(seconds)}  {published['what']}")


def _sources(steps: list[dict[str, Any]]) -> list[str]:
    """Of the published rows: their sizes, and where they stand."""
    sources: dict[str, list[str]] = {}
    for row in (row for step in steps for row in step.get("published", [])):
        sizes = f"{row['num_heads']} query heads, {row['num_kv_heads']} KV head, {row['dtype']}"
        sources.setdefault(sizes, []).append(row["source"].removeprefix("https://"))
    return [
        f"Filled stars are published times ({sizes}): {', '.join(dict.fromkeys(where))}."
        for sizes, where in sources.items()
    ]


def _explain_predictions(figure: Figure, devices: list[str]) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=device_mark(device)[0], lw=1.2, **_hollow_mark(device))
        for device in devices
    ]
    figure.legend(
        marks, devices, title="predicted, not measured:", loc="outside upper right",
        ncols=len(devices), frameon=False, fontsize=9, title_fontsize=9,
    )  # fmt: skip


def _set_time_axis(axes: Axes, low: float, high: float) -> None:
    """Logarithmic, with room for the words beside the dots."""
    from matplotlib.ticker import FixedLocator, NullLocator

    span = max(high / low, 4.0)
    axes.set_xscale("log")
    axes.set_xlim(low / span**0.05, low * span**1.65)
    axes.xaxis.set_major_locator(FixedLocator(_ticks(low, low * span**1.1)))
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.xaxis.set_minor_locator(NullLocator())


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high, with their 2 and 5 where powers alone would be few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 50 else (1,)
    return [s * 10.0**e for e in exponents for s in steps if low <= s * 10.0**e <= high]


def _tick(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _draw_memory(axes: Axes, step: dict[str, Any]) -> None:
    timed = {row: result for row, result in _rows(step).items() if "seconds" in result}
    for row, result in timed.items():
        peak = result["peak_bytes"]
        if peak is None:
            _label(axes, 0, row, "not counted", color=FLOOR_COLOUR, style="italic")
        else:
            axes.barh(row, peak, height=0.55, color=mark_of(result["name"])[0], alpha=0.8)
            _label(axes, peak, row, human_bytes(peak))
    axes.set_title("peak memory")
    axes.axvline(step["kv_bytes"], color=FLOOR_COLOUR, zorder=0.5, **KV_LINE)
    axes.set_xlim(0, 1.55 * max([result["peak_bytes"] or 0 for result in timed.values()] + [1]))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylim(_last_row(step) + 0.6, -0.6)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"dotted: K and V, {human_bytes(step['kv_bytes'])}")


def _why_not(result: dict[str, Any]) -> str:
    if "skipped" not in result:
        return result["failure"].partition(":")[0]
    text = f"skipped: {result['skipped']}"
    return text if len(text) <= 44 else text[:41].rstrip() + "..."


def _label(axes: Axes, x: float, row: float, text: str, **font: Any) -> None:
    """Words to the right of a mark, over whatever line passes behind them."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text, (x, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9.5,
        path_effects=[withStroke(linewidth=3, foreground="white")], **font,
    )  # fmt: skip
