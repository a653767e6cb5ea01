"""The ladder's picture, drawn from its JSON dictionary alone."""

from __future__ import annotations

import math

from .look import FLOOR_COLOUR, STAGE_COLOURS, WIDTH, caption, style
from .report import busy, hardware, human_bytes, human_seconds, ratio, workload


def ladder(data: dict):
    """The ladder: a row of panels for each context, time on the left, memory on the right.

    Args:    data: what `ladder.describe` and `ladder.ContextRun.entry` make, as in ladder.json
    Returns: matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    entries = data["contexts"]
    heights = [0.75 + 0.29 * len(entry["stages"]) for entry in entries]
    with style():
        figure = Figure(figsize=(WIDTH, sum(heights) + 1.2), layout="constrained")
        figure.get_layout_engine().set(wspace=0.04)
        figure.suptitle(
            "One decode step of PagedAttention V2, stage by stage",
            x=0.01,
            ha="left",
            fontsize=12,
            fontweight="bold",
        )
        panels = figure.subplots(
            len(entries), 2, squeeze=False, height_ratios=heights, width_ratios=(2.6, 1)
        )
        for (time, memory), entry in zip(panels, entries):
            _draw_times(time, entry)
            _draw_memory(memory, entry)
        lines = [
            f"{hardware(data)}.",
            f"{workload(data)}.",
            "Dots are medians, bars the middle half of the samples; the floor is torch.mv reading "
            "as many bytes as K and V hold.",
            *busy(max(entries, key=lambda entry: entry["other_cores"] or 0.0)),
        ]
        if data["interrupted"]:
            lines.append("The run was interrupted: this is what it had measured.")
        caption(figure, lines)
    return figure


def _draw_times(axes, entry: dict) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    stages, floor = entry["stages"], entry["floor"]
    times = [stage["seconds"] for stage in stages if "seconds" in stage]
    times += [floor["seconds"]] if floor else []
    low, high = (min(times), max(times)) if times else (1e-3, 1.0)
    for row, stage in enumerate(stages):
        colour = STAGE_COLOURS[stage["name"]]
        if "failure" in stage:
            reason = stage["failure"].partition(":")[0]
            _label(axes, low, row, reason, color=FLOOR_COLOUR, style="italic")
            continue
        seconds = stage["seconds"]
        if floor:
            axes.hlines(row, floor["seconds"], seconds, color=colour, lw=1, alpha=0.45)
        axes.plot(
            stage["spread"], [row, row], color=colour, lw=5, alpha=0.5, solid_capstyle="butt"
        )
        axes.plot(seconds, row, "o", color=colour, ms=7)
        times_floor = f"  {ratio(seconds / floor['seconds'])}x floor" if floor else ""
        _label(
            axes,
            max(seconds, stage["spread"][1], floor["seconds"] if floor else 0.0),
            row,
            f"{human_seconds(seconds)}{times_floor}",
        )
    axes.set_title(f"{entry['context']:,} tokens")
    if floor:
        axes.axvline(floor["seconds"], color=FLOOR_COLOUR, lw=1.5, ls=(0, (4, 2)), zorder=0.5)
        axes.set_title(
            f"dashed: the floor, {human_seconds(floor['seconds'])} "
            f"at {floor['gb_per_second']:.1f} GB/s",
            loc="right",
            fontsize=9,
            fontweight="normal",
            color="#333333",
        )
    span = max(high / low, 4.0)
    axes.set_xscale("log")
    axes.set_xlim(low / span**0.05, low * span**1.65)  # room for the words beside the dots
    axes.xaxis.set_major_locator(FixedLocator(_ticks(low, low * span**1.1)))
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(stages)), [stage["name"] for stage in stages])
    axes.set_ylim(len(stages) - 0.4, -0.6)


def _draw_memory(axes, entry: dict) -> None:
    stages = entry["stages"]
    peaks = [stage.get("peak_bytes", 0) for stage in stages]
    most = max([*peaks, 1])
    for row, (stage, peak) in enumerate(zip(stages, peaks)):
        if "failure" in stage:
            continue
        axes.barh(row, peak, height=0.55, color=STAGE_COLOURS[stage["name"]], alpha=0.8)
        _label(axes, peak, row, human_bytes(peak))
    axes.set_title("peak memory")
    axes.axvline(entry["kv_bytes"], color=FLOOR_COLOUR, lw=1.5, ls=":", zorder=0.5)
    axes.set_xlim(0, 1.55 * most)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"dotted: K and V, {human_bytes(entry['kv_bytes'])}")


def _label(axes, x: float, row: int, text: str, **properties) -> None:
    """Words to the right of a mark, over whatever line passes behind them."""
    from matplotlib.patheffects import withStroke

    axes.annotate(
        text,
        (x, row),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        **properties,
    )


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high, with their 2 and 5 where that would leave few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 50 else (1,)
    return [s * 10.0**e for e in exponents for s in steps if low <= s * 10.0**e <= high]


def _tick(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
