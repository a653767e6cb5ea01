"""How every picture of the project looks: colours, style, small print."""

from __future__ import annotations

import textwrap
from contextlib import contextmanager

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
# Peers have a colour and a mark of their own; our kernel in other layouts stays black.
PEER_MARKS = {
    "paged_attention_HND": ("#000000", "s"),
    "paged_attention_NHD": ("#000000", "D"),
    "gather_sdpa": ("#AA4499", "^"),
    "dense_sdpa": ("#999933", "v"),
    "flex_paged": ("#CC6677", "P"),
    "vllm_cpu_op": ("#117733", "X"),
}
# Devices of which there are predictions only: hollow marks, in the colours of `curves`.
DEVICE_MARKS = {"BI-V100": ("#882255", "s"), "H200": ("#332288", "D")}
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


def mark_of(name: str) -> tuple[str, str]:
    """Colour and mark of a stage or a peer."""
    return (STAGE_COLOURS[name], "o") if name in STAGE_COLOURS else PEER_MARKS[name]


def log_axes(axes, xs, xlabel: str, ylabel: str, human) -> None:
    """Both axes logarithmic, a tick at each x, y in words: `human` makes them of a number."""
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.xaxis.set_minor_formatter("")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: human(value))
    axes.yaxis.set_minor_formatter("")
    axes.grid(True, axis="both", which="both", color="#E9E9E9", linewidth=0.6)
    axes.set_axisbelow(True)
