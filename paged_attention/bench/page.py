"""The page that a run's picture stands on: its title, its style and its small print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_attention.bench.captions import hardware, workload
from paged_attention.plots.style import WIDTH, Figure, caption, style

FLOOR_LINE = {"lw": 1.5, "ls": (0, (4, 2))}  # dashed
KV_LINE = {"lw": 1.5, "ls": ":"}


@contextmanager
def page(run: dict[str, Any], title: str, height: float, notes: list[str]) -> Iterator[Figure]:
    """A titled figure to draw on, which gets its small print when the block ends.

    Args:    run: the dictionary of a run
             height: inches
             notes: small print beside what the run says of itself
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        yield figure
        lines = [f"{hardware(run)}.", f"{workload(run)}.", *notes]
        if run["interrupted"]:
            lines.append("The run was interrupted: this is what it had measured.")
        caption(figure, lines)
