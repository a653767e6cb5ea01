"""Every picture of the project, each drawn from a JSON dictionary alone.

    python -m paged_attention.plots figures     draws each PNG again from the JSON beside it

The same JSON gives the same picture. Needs the extra `notebooks` (matplotlib), which is imported
only when something is drawn.
"""

from __future__ import annotations

import io
import json
import math
import sys
import textwrap
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from .report import busy, hardware, human_bytes, human_seconds, ratio, workload, write_bytes

# A stage keeps its colour in every figure: Okabe and Ito's palette, which colour-blind readers
# can tell apart, less its yellow, which can't be seen on white.
STAGE_COLOURS = {
    "naive_loops": "#D55E00",
    "batched_gather": "#E69F00",
    "single_bmm": "#CC79A7",
    "gqa_broadcast": "#56B4E9",
    "single_tile": "#0072B2",
    "fused_phase2": "#009E73",
    "paged_attention": "#000000",
}
FLOOR_COLOUR = "#767676"
WIDTH = 8.0  # inches; at 200 dots an inch twice the 800 pixels that a README shows
DPI = 200

_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.labelcolor": "#333333",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#E6E6E6",
    "xtick.labelsize": 9,
    "ytick.labelsize": 10,
    "ytick.major.size": 0,
    "savefig.facecolor": "white",
    "figure.facecolor": "white",
}


@contextmanager
def style():
    """The house style for what is created inside, whatever the reader's own settings are."""
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]):
        yield


def caption(figure, lines: list[str]) -> None:
    """Small print under a figure: device, dtype, shape, torch version. Long lines are wrapped."""
    text = "\n".join("\n".join(textwrap.wrap(line, 118)) for line in lines)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color="#555555", linespacing=1.4)


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


# -- files ---------------------------------------------------------------------------------------

FIGURES: dict[str, Callable] = {"ladder": ladder}  # by the JSON's "kind"


def png(data: dict) -> bytes:
    """The picture of a JSON dictionary, by its "kind"; the same bytes for the same dictionary.

    Raises: ValueError: a kind that nothing draws
    """
    kind = data.get("kind")
    if kind not in FIGURES:
        raise ValueError(f'"kind" is {kind!r}, should be one of {", ".join(FIGURES)}')
    content = io.BytesIO()
    FIGURES[kind](data).savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def redraw(directory) -> list[Path]:
    """Draw the PNG beside every JSON under `directory` again.

    Returns: the PNGs written, in order
    Raises:  ValueError: a JSON that isn't a figure's, by name; FileNotFoundError: no such folder
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a folder")
    written = []
    for source in sorted(directory.rglob("*.json")):
        try:
            content = png(json.loads(source.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: {type(error).__name__}: {error}") from error
        written.append(source.with_suffix(".png"))
        write_bytes(written[-1], content)
    return written


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("python -m paged_attention.plots takes one folder: figures", file=sys.stderr)
        return 2
    try:
        written = redraw(argv[0])
    except ImportError:
        print("Figures need matplotlib: pip install -e .[notebooks]", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"python -m paged_attention.plots: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)) or f"No JSON under {argv[0]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
