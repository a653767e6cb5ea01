"""Every picture of the project, each drawn from a JSON dictionary alone.

    python -m paged_attention.bench.figures figures     draws the PNGs again from their JSON

The same JSON gives the same picture. Needs the extra `notebooks` (matplotlib), which is imported
only when something is drawn.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

from paged_attention.bench.files import write_bytes
from paged_attention.bench.ladder_plot import draw_ladder
from paged_attention.bench.lengths_plot import draw_lengths
from paged_attention.plots.style import (
    DPI,
    FLOOR_COLOUR,
    PEER_MARKS,
    STAGE_COLOURS,
    WIDTH,
    caption,
    style,
)

__all__ = [
    "DPI",
    "FIGURES",
    "FLOOR_COLOUR",
    "PEER_MARKS",
    "STAGE_COLOURS",
    "WIDTH",
    "caption",
    "draw_ladder",
    "draw_lengths",
    "names",
    "png",
    "redraw",
    "style",
]

# By the JSON's "kind", then by what is added to its name.
FIGURES: dict[str, dict[str, Callable]] = {"ladder": {"": draw_ladder, "_lengths": draw_lengths}}


def names(data: dict) -> list[str]:
    """What is added to a JSON's name for each of its pictures: nothing for the main one.

    Raises: ValueError: a kind that nothing draws
    """
    kind = data.get("kind")
    if kind not in FIGURES:
        raise ValueError(f'"kind" is {kind!r}, should be one of {", ".join(FIGURES)}')
    several = len(data["contexts"]) > 1  # of a single length there is no curve
    return [name for name in FIGURES[kind] if several or not name]


def png(data: dict, name: str = "") -> bytes:
    """A picture of a JSON dictionary, by its "kind"; the same bytes for the same dictionary.

    Args:   name: one of `names(data)`
    Raises: ValueError: a kind that nothing draws
    """
    if name not in names(data):
        raise ValueError(f"name={name!r} must be one of {names(data)}")
    content = io.BytesIO()
    figure = FIGURES[data["kind"]][name](data)
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def draw(source: Path, data: dict) -> list[Path]:
    """Write the pictures of a JSON beside it, and take away one that it has no longer.

    Returns: the PNGs written, in order
    Raises:  ValueError: a kind that nothing draws
    """
    there, written = names(data), []
    for name in FIGURES[data["kind"]]:
        path = source.with_name(f"{source.stem}{name}.png")
        if name in there:
            write_bytes(path, png(data, name))
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def redraw(directory) -> list[Path]:
    """Draw the PNGs beside every JSON under `directory` again.

    Returns: the PNGs written, in order
    Raises:  ValueError: a JSON that isn't a figure's, by name; FileNotFoundError: no such folder
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a folder")
    written = []
    for source in sorted(directory.rglob("*.json")):
        try:
            written += draw(source, json.loads(source.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: {type(error).__name__}: {error}") from error
    return written


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("python -m paged_attention.bench.figures takes one folder: figures", file=sys.stderr)
        return 2
    try:
        written = redraw(argv[0])
    except ImportError:
        print("Figures need matplotlib: pip install -e .[notebooks]", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"python -m paged_attention.bench.figures: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)) or f"No JSON under {argv[0]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
