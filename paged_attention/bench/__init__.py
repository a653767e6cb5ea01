"""The command: every stage, the kernel and its peers, measured on the machine at hand."""

from paged_attention.bench.ladder_plot import draw_ladder
from paged_attention.bench.lengths_plot import draw_lengths

__all__ = [
    "draw_ladder",
    "draw_lengths",
]
