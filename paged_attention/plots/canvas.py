"""The parts that the notebooks' pictures are made of: panels, boxes with words, legends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paged_attention.plots.style import Axes, Figure, style

SEQUENCE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
UNUSED = "#E5E5E5"
LIGHT = ("#E69F00", "#CC79A7", "#56B4E9", UNUSED, "white")  # text on these is dark
INK = "#222222"


def new_panels(width: float, *heights: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure in the house style: a panel of each height, one below another.

    Args:    width, heights: inches
             columns: how many panels stand beside each other in a row
    Returns: figure: a notebook shows it only if it is the last value of a cell
             axes: of the panels, row by row
    """
    import matplotlib.pyplot as plt

    with style():
        figure, axes = plt.subplots(
            len(heights), columns, squeeze=False, height_ratios=heights,
            figsize=(width, sum(heights)), dpi=110, layout="constrained",
        )  # fmt: skip
    plt.close(figure)
    return figure, list(axes.flat)


def sequence_colour(index: int) -> str:
    """The colour of a batch's sequence; the seventh has the first one's again."""
    return SEQUENCE_COLOURS[index % len(SEQUENCE_COLOURS)]


def box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    *,
    text: str = "",
    text_size: float = 8,
    bold: bool = False,
    **edge: Any,
) -> None:
    """A rectangle with `text` in its middle; (x, y) is its lower left corner.

    Args:    edge: what its edge and its hatch look like, as `matplotlib.patches.Patch` takes it
    """
    from matplotlib.patches import Rectangle

    edge = {"edgecolor": "white", "linewidth": 0.8, **edge}
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, **edge))
    if text:
        ax.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=text_size,
            weight="bold" if bold else "normal", color=INK if colour in LIGHT else "white",
        )  # fmt: skip


def legend_above(ax: Axes, columns: int, **handles: Any) -> None:
    """A legend in one line above the axes, from their left edge on."""
    ax.legend(
        ncols=columns, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1),
        **handles,
    )  # fmt: skip


def finish(ax: Axes, title: str = "") -> None:
    """Hide the axes' lines and ticks, and fit the limits to what was drawn."""
    ax.set_title(title, fontsize=9, loc="left", color=INK)
    ax.autoscale_view()
    ax.axis("off")


def listed(values: Iterable[object]) -> str:
    """Such as "3, 1, 4", for an alternative text."""
    return ", ".join(map(str, values))
