"""Every picture of the project, each drawn from a JSON dictionary alone.

    python -m paged_attention.plots figures     draws each PNG again from the JSON beside it

The same JSON gives the same picture. Needs the extra `notebooks` (matplotlib), which is imported
only when something is drawn.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

from .ladder_plot import ladder
from .look import DPI, FLOOR_COLOUR, PEER_MARKS, STAGE_COLOURS, WIDTH, caption, style
from .report import write_bytes

__all__ = [
    "DPI",
    "FIGURES",
    "FLOOR_COLOUR",
    "PEER_MARKS",
    "STAGE_COLOURS",
    "WIDTH",
    "caption",
    "ladder",
    "png",
    "redraw",
    "style",
]

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
