"""The ladder's picture, drawn from its JSON dictionary alone."""

from __future__ import annotations

import math

from paged_attention.bench.captions import busy, hardware, workload
from paged_attention.measure.units import human_bytes, human_seconds, ratio
from paged_attention.plots.style import FLOOR_COLOUR, WIDTH, caption, device_mark, mark_of, style

_MOST_ROWS = 3  # of panels, which a page still shows


def draw_ladder(data: dict):
    """The ladder: a row of panels for each context, time on the left, memory on the right; of more
    than three contexts for the shortest and the longest, as `lengths_plot` has them all.

    Args:    data: what `ladder.describe` and `ladder.ContextRun.entry` make, as in ladder.json
    Returns: matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    entries = data["contexts"]
    if len(entries) > _MOST_ROWS:
        entries = sorted(entries, key=lambda entry: entry["context"])[:: len(entries) - 1]
    heights = [
        0.75 + 0.29 * (1 + _rows(entry)[-1][0]) if _rows(entry) else 1.0 for entry in entries
    ]
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
        devices = {device for entry in entries for device in entry.get("predicted", {})}
        if devices:
            _explain_predictions(figure, sorted(devices))
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
        if devices:
            lines.insert(
                3,
                "Hollow marks are what the cost model makes of published figures, "
                "from the best of them to the worst.",
            )
        if data["interrupted"]:
            lines.append("The run was interrupted: this is what it had measured.")
        caption(figure, lines)
    return figure


_PEERS_BELOW = 0.5  # rows of space between the stages and the peers


def _rows(entry: dict) -> list[tuple[float, dict]]:
    """(height in rows, result) of stages, then of peers, further below."""
    stages, peers = entry["stages"], entry.get("peers", [])
    rows = list(enumerate(stages))
    return rows + [(len(stages) + _PEERS_BELOW + i, peer) for i, peer in enumerate(peers)]


def _draw_times(axes, entry: dict) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    rows, floor = _rows(entry), entry["floor"]
    predicted = _predicted(entry)
    timed = [result for _, result in rows if "seconds" in result]
    times = [result["seconds"] for result in timed] + [result["spread"][0] for result in timed]
    times += [floor["seconds"]] if floor else []
    times += [seconds for bands in predicted.values() for _, band in bands for seconds in band]
    low, high = (min(times), max(times)) if times else (1e-3, 1.0)
    for row, result in rows:
        colour, mark = mark_of(result["name"])
        bands = predicted.get(result["name"], [])
        for device, band in bands:
            _draw_prediction(axes, row, device, band)
        right = max([band[1] for _, band in bands], default=low)
        if "seconds" not in result:
            _label(axes, right, row, _why_not(result), color=FLOOR_COLOUR, style="italic")
            continue
        seconds = result["seconds"]
        if floor:
            axes.hlines(row, floor["seconds"], seconds, color=colour, lw=1, alpha=0.45)
        axes.plot(
            result["spread"], [row, row], color=colour, lw=5, alpha=0.5, solid_capstyle="butt"
        )
        axes.plot(seconds, row, mark, color=colour, ms=7)
        times_floor = f"  {ratio(seconds / floor['seconds'])}x floor" if floor else ""
        _label(
            axes,
            max(seconds, result["spread"][1], floor["seconds"] if floor else 0.0, right),
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
    axes.set_yticks([row for row, _ in rows], [result["name"] for _, result in rows])
    axes.set_ylim(rows[-1][0] + 0.6 if rows else 0.6, -0.6)


def _predicted(entry: dict) -> dict[str, list[tuple[str, list[float]]]]:
    """{stage: [(device, [low, high]), ...]}, of the stages that are drawn."""
    names = [stage["name"] for stage in entry["stages"]]
    by_device = entry.get("predicted", {})
    return {
        name: [(device, bands[name]) for device, bands in by_device.items() if name in bands]
        for name in names
    }


def _draw_prediction(axes, row: float, device: str, band: list[float]) -> None:
    """A bar from low to high, and a hollow mark in its middle."""
    colour, mark = device_mark(device)
    axes.plot(band, [row, row], color=colour, lw=1.2, solid_capstyle="butt")
    middle = math.sqrt(band[0] * band[1])
    axes.plot(middle, row, mark, mec=colour, mfc="white", mew=1.2, ms=5)


def _explain_predictions(figure, devices: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for device in devices:
        colour, mark = device_mark(device)
        handles.append(
            Line2D([], [], color=colour, lw=1.2, marker=mark, mfc="white", mew=1.2, ms=5)
        )
    figure.legend(
        handles,
        devices,
        title="predicted, not measured:",
        loc="outside upper right",
        ncols=len(devices),
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )


def _why_not(result: dict) -> str:
    if "skipped" in result:
        text = f"skipped: {result['skipped']}"
        return text if len(text) <= 44 else text[:41].rstrip() + "..."
    return result["failure"].partition(":")[0]


def _draw_memory(axes, entry: dict) -> None:
    rows = _rows(entry)
    most = max([result.get("peak_bytes") or 0 for _, result in rows] + [1])
    for row, result in rows:
        if "seconds" not in result:
            continue
        peak = result["peak_bytes"]
        if peak is None:
            _label(axes, 0, row, "not counted", color=FLOOR_COLOUR, style="italic")
            continue
        colour, _ = mark_of(result["name"])
        axes.barh(row, peak, height=0.55, color=colour, alpha=0.8)
        _label(axes, peak, row, human_bytes(peak))
    axes.set_title("peak memory")
    axes.axvline(entry["kv_bytes"], color=FLOOR_COLOUR, lw=1.5, ls=":", zorder=0.5)
    axes.set_xlim(0, 1.55 * most)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylim(rows[-1][0] + 0.6 if rows else 0.6, -0.6)
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
