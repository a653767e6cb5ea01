"""Pictures for the notebooks: of measurements (`curves`), of ideas and of a pool."""

from paged_attention.plots.bars import draw_explained, draw_verdict, explained, tell
from paged_attention.plots.curves import (
    draw_breakdown,
    draw_costs,
    draw_floor,
    draw_lines,
    draw_wave_sizes,
)
from paged_attention.plots.ideas import (
    draw_addresses,
    draw_cells,
    draw_groups,
    draw_padding,
    draw_partitions,
    draw_path,
    draw_steps,
    draw_waves,
)
from paged_attention.plots.picture import Picture
from paged_attention.plots.pool import draw_history, draw_pool
from paged_attention.plots.way import draw_way
from paged_attention.plots.weights import draw_mass, draw_weights

__all__ = [
    "Picture",
    "draw_addresses",
    "draw_breakdown",
    "draw_cells",
    "draw_costs",
    "draw_explained",
    "draw_floor",
    "draw_groups",
    "draw_history",
    "draw_lines",
    "draw_mass",
    "draw_padding",
    "draw_partitions",
    "draw_path",
    "draw_pool",
    "draw_steps",
    "draw_verdict",
    "draw_wave_sizes",
    "draw_waves",
    "draw_way",
    "draw_weights",
    "explained",
    "tell",
]
