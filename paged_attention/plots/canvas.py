"""What the notebooks' pictures are put together from: a figure, boxes, colours."""

from paged_attention.plots.style import style

SEQUENCE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
UNUSED = "#E5E5E5"
LIGHT = ("#E69F00", "#CC79A7", "#56B4E9", UNUSED)  # text on them is dark
INK = "#222222"


def new_figure(width, height, rows=1, columns=1, **grid):
    """(figure, axes) in the house style, inches; shown only where it is a cell's last value."""
    import matplotlib.pyplot as plt

    with style():
        fig, axes = plt.subplots(
            rows, columns, figsize=(width, height), dpi=110, layout="constrained", **grid
        )
    plt.close(fig)
    return fig, axes


def box(ax, x, y, width, height, colour, *, edge="white", hatch=None, line=0.8):
    """A rectangle from its lower left corner on."""
    from matplotlib.patches import Rectangle

    ax.add_patch(
        Rectangle(
            (x, y), width, height, facecolor=colour, edgecolor=edge, hatch=hatch,
            linewidth=line,
        )
    )  # fmt: skip


def text_colour(background):
    """Dark on light, white on dark."""
    return INK if background in LIGHT else "white"


def finish(ax):
    """No axes, and as large as what was drawn."""
    ax.autoscale_view()
    ax.axis("off")
