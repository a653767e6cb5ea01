"""How every picture of the project looks: colours, marks, small print, curves and log axes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # matplotlib is imported only when something is drawn
    import matplotlib.axes
    import matplotlib.figure
Axes: TypeAlias = "matplotlib.axes.Axes"
Figure: TypeAlias = "matplotlib.figure.Figure"
Spread: TypeAlias = tuple[float, tuple[float, float]]  # median, (lower quartile, upper quartile)

# A stage keeps its colour in every figure. The palette is Okabe and Ito's, which colour-blind
# readers can tell apart. Its yellow is left out, because it can't be seen on white.
STAGE_COLOURS = {
    "naive_loops": "#D55E00",
    "batched_gather": "#E69F00",
    "single_bmm": "#CC79A7",
    "gqa_broadcast": "#56B4E9",
    "single_tile": "#0072B2",
    "fused_phase2": "#009E73",
    "paged_attention": "#000000",
}
# A peer has a colour and a mark that no stage has. Our kernel stays black in every layout.
PEER_MARKS = {
    "paged_attention_HND": ("#000000", "s"),
    "paged_attention_NHD": ("#000000", "D"),
    "paged_attention_numba": ("#000000", "*"),
    "gather_sdpa": ("#AA4499", "^"),
    "dense_sdpa": ("#999933", "v"),
    "flex_paged": ("#CC6677", "P"),
    "vllm_cpu_op": ("#117733", "X"),
}
# Devices that were not measured, only predicted.
_DEVICE_MARKS = {"BI-V100": ("#882255", "s"), "H200": ("#332288", "D")}
FLOOR_COLOUR = "#767676"
WIDTH = 8.0  # inches
DPI = 200  # 1,600 pixels across, twice what a README shows

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
def style() -> Iterator[None]:
    """What is created inside has the house style, whatever the reader's own settings are."""
    import matplotlib.style

    with matplotlib.style.context(["default", _STYLE]):
        yield


def mark_of(name: str) -> tuple[str, str]:
    """The colour and the mark of a stage or a peer."""
    return (STAGE_COLOURS[name], "o") if name in STAGE_COLOURS else PEER_MARKS[name]


def device_mark(name: str) -> tuple[str, str]:
    """The colour and the mark of a device that is predicted; grey for one not known here."""
    return _DEVICE_MARKS.get(name, ("#555555", "o"))


def caption(figure: Figure, lines: Iterable[str]) -> None:
    """Small print under a figure; long lines are wrapped."""
    text = "\n".join("\n".join(textwrap.wrap(line, 118)) for line in lines)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color="#555555", linespacing=1.4)


def median_curve(ax: Axes, points: Mapping[int, Spread], fmt: str = "o-", **line: Any) -> None:
    """A curve through medians, with the band between the quartiles shaded behind it.

    Args:    points: {x: (median, (lower quartile, upper quartile))}
             fmt, line: what the curve looks like, as `Axes.plot` takes it
    """
    xs = list(points)
    medians, quartiles = zip(*points.values())
    low, high = zip(*quartiles)
    ax.plot(xs, medians, fmt, **line)
    ax.fill_between(xs, low, high, color=line["color"], alpha=0.15, linewidth=0)


def log_axes(
    ax: Axes, xs: Sequence[int], xlabel: str, ylabel: str, in_words: Callable[[float], str]
) -> None:
    """Make both axes logarithmic, with a tick at each of `xs` and y's ticks in words.

    Args:    in_words: makes a tick's label of its value
    """
    from matplotlib.ticker import LogLocator

    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.set_xticks(xs, [f"{x:,}" for x in xs])
    ax.xaxis.set_minor_formatter("")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    ax.yaxis.set_major_formatter(lambda value, _: in_words(value))
    ax.yaxis.set_minor_formatter("")
    ax.grid(True, axis="both", which="both", color="#E9E9E9", linewidth=0.6)
    ax.set_axisbelow(True)
