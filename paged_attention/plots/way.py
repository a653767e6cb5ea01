"""The way of K and V through a step: cache, gathered, reordered, ..., result.

The same picture in every notebook, drawn from a counted call. An arrow says what its part reads
and writes, in multiples of K and V.
"""

from __future__ import annotations

from collections.abc import Mapping

from paged_attention.cost.way import PARTS, Part
from paged_attention.plots.canvas import INK, UNUSED, box, finish, new_panels
from paged_attention.plots.picture import Picture
from paged_attention.plots.style import Axes

_PLACES = (
    "cache", "gathered", "in order", "repeated,\npadded", "logits", "weights", "states", "result",
)  # fmt: skip
_CHANGED, _SAME = "#D55E00", "#56606B"
_STEP, _WIDTH, _ROW = 3.0, 1.25, 2.1  # of a place, in the units of the axes


def draw_way(
    way: Mapping[str, Part], kv_bytes: int, *, before: Mapping[str, Part] | None = None
) -> Picture:
    """The data's way through a step, with what this notebook changes drawn strong.

    Args:    way: as `cost.way_of` gives it
             kv_bytes: of K and V
             before: the same of the stage before. A part that moves other bytes is drawn in
                   colour, and its former operations stand beside its own. None: nothing changes
    """
    figure, [ax] = new_panels(8.0, 2.75)
    words = []
    for i, name in enumerate(PARTS):
        part, old = way[name], way[name] if before is None else before[name]
        changed = _moved(part, kv_bytes) != _moved(old, kv_bytes)
        _arrow(ax, i, part, old, _moved(part, kv_bytes), _CHANGED if changed else _SAME)
        if part.ops:
            words.append(f"{name}: {_moved(part, kv_bytes)}{', changed' * changed}")
    for i, name in enumerate(_PLACES):
        reached = i == 0 or bool(way[PARTS[i - 1]].ops)
        x, y = _corner(i)
        box(
            ax, x, y, _WIDTH, 0.9, "white" if reached else UNUSED, text=name, text_size=9,
            edgecolor=INK if reached else "#BBBBBB", linewidth=1.2,
        )  # fmt: skip
    finish(ax)
    ax.set_xlim(-0.1, 3 * _STEP + _WIDTH + 0.1)
    alt = "The data's way, in multiples of K and V. " + "; ".join(words) + "."
    return Picture(figure, alt)


def _corner(place: int) -> tuple[float, float]:
    row, column = divmod(place, 4)
    return column * _STEP, -row * _ROW


def _moved(part: Part, kv_bytes: int) -> str:
    read, written = part.bytes_read / kv_bytes, part.bytes_written / kv_bytes
    return f"reads {_times(read)}, writes {_times(written)}"


def _times(value: float) -> str:
    return f"{value:.1f}" if value >= 0.05 else "<0.1" if value else "0"


def _arrow(ax: Axes, i: int, part: Part, old: Part, moved: str, colour: str) -> None:
    """The arrow of part `i`, with its name above and what it costs below."""
    (x, y), (to_x, to_y) = _corner(i), _corner(i + 1)
    colour = colour if part.ops else "#BBBBBB"
    line = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.4 if part.ops else 1.0}
    line |= {"linestyle": "-" if part.ops else ":", "shrinkA": 0, "shrinkB": 0}
    middle, level = (x + _WIDTH + to_x) / 2, y + 0.45
    if y == to_y:
        ax.annotate("", (to_x, level), (x + _WIDTH, level), arrowprops=line)
    else:  # down to the next row
        level, ends = y - 0.55, (x + _WIDTH / 2, to_x + _WIDTH / 2)
        ax.plot([ends[0], *ends], [y, level, level], color=colour, linewidth=2.4)
        ax.annotate("", (ends[1], to_y + 0.9), (ends[1], level), arrowprops=line)
        middle = sum(ends) / 2
    style = {"ha": "center", "fontsize": 9, "color": colour}
    ax.text(middle, level + 0.1, PARTS[i], va="bottom", weight="bold", **style)
    if part.ops:
        ops = f"{part.ops:,} op{'s' * (part.ops != 1)}"
        if part.ops != old.ops:
            ops += f" (was {old.ops:,})"
        lines = [moved.replace(", ", "\n" if y == to_y else ", "), ops]
        ax.text(middle, level - 0.07, "\n".join(lines), va="top", linespacing=1.25, **style)
