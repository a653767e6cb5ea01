"""The two pictures that explain a time: what it is made of, and on which device it turns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from paged_attention.measure.profiles import Figure as Band
from paged_attention.measure.timing import Measurement
from paged_attention.measure.units import human_seconds, ratio
from paged_attention.plots.canvas import INK, legend_above, new_panels
from paged_attention.plots.picture import Picture
from paged_attention.plots.style import FLOOR_COLOUR, device_mark

UNEXPLAINED = "unexplained"
PART_COLOURS = {
    "operations": "#332288",
    "streamed bytes": "#88CCEE",
    "rearranged bytes": "#117733",
    "fresh pages": "#DDCC77",
    UNEXPLAINED: "#DDDDDD",
}


_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def explained(
    measured: Mapping[str, float], parts: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """The parts of each time, with what they leave unexplained.

    Args:    measured: {name: seconds}
             parts: {name: {part: seconds}}, as `cost.parts_of` gives them
    Returns: {name: {part: seconds}}, which add up to what was measured. The unexplained part is
             negative where a call was faster than its parts
    """
    return {
        name: {**parts[name], UNEXPLAINED: seconds - sum(parts[name].values())}
        for name, seconds in measured.items()
    }


def draw_explained(bars: Mapping[str, Mapping[str, float]], *, caption: str) -> Picture:
    """A bar for each call: operations, bytes, fresh pages and the unexplained, up to the time.

    Where a call was faster than its parts, the bar of its parts ends in a hatched piece, which
    reaches back to the measured time.

    Args:    bars: {name: {part: seconds}}, as `explained` gives them
             caption: the device and the workload, in words
    """
    from matplotlib.patches import Patch

    figure, [ax] = new_panels(8.0, 0.5 * len(bars) + 1.3)
    longest = max(sum(max(s, 0) for s in parts.values()) for parts in bars.values())
    texts = []
    for row, (name, parts) in enumerate(bars.items()):
        left, whole = 0.0, sum(parts.values())
        for part, seconds in parts.items():
            start = left if seconds >= 0 else left + seconds
            hatch = None if seconds >= 0 else "////"
            colour = PART_COLOURS[part] if seconds >= 0 else "none"
            ax.barh(row, 1e3 * abs(seconds), left=1e3 * start, height=0.62, color=colour,
                    hatch=hatch, edgecolor=INK if hatch else "white", linewidth=0.6)  # fmt: skip
            if seconds > 0.07 * longest:
                dark = part in ("operations", "rearranged bytes")
                ax.text(1e3 * (start + seconds / 2), row, human_seconds(seconds), fontsize=8,
                        ha="center", va="center", color="white" if dark else INK)  # fmt: skip
            left += seconds
        end = max(left, left - min(parts[UNEXPLAINED], 0))
        ax.text(1e3 * (end + 0.01 * longest), row, human_seconds(whole), va="center",
                fontsize=9, weight="bold", color=INK)  # fmt: skip
        ax.plot([1e3 * whole] * 2, [row - 0.38, row + 0.38], color=INK, linewidth=2)
        texts.append(f"{name} {human_seconds(whole)} = " + _sum(parts))
    handles = [Patch(facecolor=colour, label=part) for part, colour in PART_COLOURS.items()]
    ax.set_yticks(range(len(bars)), list(bars))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12e3 * longest)
    ax.set_xlabel(f"milliseconds. {caption}")
    legend_above(ax, len(PART_COLOURS), handles=handles)
    return Picture(figure, "What each time is made of. " + "; ".join(texts) + ".")


def _sum(parts: Mapping[str, float]) -> str:
    signed = {part: "-" * (s < 0) + human_seconds(abs(s)) for part, s in parts.items()}
    return " + ".join(f"{part} {seconds}" for part, seconds in signed.items())


def tell(bars: Mapping[str, Mapping[str, float]]) -> None:
    """Print what `draw_explained` draws, in milliseconds."""
    columns = ["measured", *PART_COLOURS]
    print(f"{'ms':16s}" + "".join(f"{name.split()[0]:>12s}" for name in columns))
    for name, parts in bars.items():
        numbers = [sum(parts.values()), *(parts[part] for part in PART_COLOURS)]
        print(f"{name:16s}" + "".join(f"{1e3 * seconds:12.2f}" for seconds in numbers))


def draw_verdict(
    measured: Mapping[int, tuple[Measurement, Measurement]],
    predicted: Mapping[str, Mapping[int, tuple[Band, Band]]],
    names: tuple[str, str],
) -> Picture:
    """How much slower the second call is than the first: measured here, and predicted elsewhere.

    Args:    measured: {tokens: (Measurement of the first, of the second)}
             predicted: {device: {tokens: (seconds of the first, of the second)}}, as
                   `cost.predict` gives them; "here" is this machine
             names: of the two calls
    """
    rows = {"here, measured": {n: _ratio_of(a.spread, b.spread) for n, (a, b) in measured.items()}}
    for device, pairs in predicted.items():
        rows[f"{device}, predicted"] = {
            n: _ratio_of((a.low, a.high), (b.low, b.high), together=True)
            for n, (a, b) in pairs.items()
        }
    figure, [ax] = new_panels(8.0, 0.27 * sum(map(len, rows.values())) + 1.3)
    y, ticks, texts = 0.0, [], []
    for label, ratios in rows.items():
        colour, mark = device_mark(label.split(",")[0])
        is_measured = label.endswith("measured")
        for tokens, (low, high) in ratios.items():
            middle = numpy.sqrt(low * high)
            ax.plot([low, high], [y, y], color=colour, linewidth=3, alpha=0.5)
            ax.plot(middle, y, mark, color=colour, markersize=8,
                    markerfacecolor=colour if is_measured else "white")  # fmt: skip
            ax.text(max(high, middle) * 1.04, y, f"{ratio(middle)} times", fontsize=8.5,
                    va="center", color=INK)  # fmt: skip
            ticks.append((y, f"{label}, {tokens:,} tokens"))
            texts.append(f"{ticks[-1][1]}: {ratio(middle)} times")
            y += 1
        y += 0.5
    ax.set_xscale("log")
    ax.axvline(1, color=FLOOR_COLOUR, linewidth=1.2)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.8), max(1.25, high * 1.5))
    ax.set_yticks(*zip(*ticks))
    ax.tick_params(axis="y", labelsize=9)
    ax.invert_yaxis()
    low, high = ax.get_xlim()
    xs = [x for x in _TICKS if low <= x <= high]
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.xaxis.set_minor_formatter("")
    ax.set_xlabel(f"time of {names[1]} / time of {names[0]}: left of 1 it is faster, right slower")
    return Picture(figure, f"Time of {names[1]} over {names[0]}. " + "; ".join(texts) + ".")


def _ratio_of(
    first: tuple[float, float], second: tuple[float, float], *, together: bool = False
) -> tuple[float, float]:
    """The band of second / first. together: both have their best figures at once."""
    ends = [second[0] / first[0], second[1] / first[1]] if together else None
    ends = ends or [second[0] / first[1], second[1] / first[0]]
    return min(ends), max(ends)
