"""The pictures of a run, each drawn from its JSON alone.

    python -m paged_attention.bench.figures figures     draws the PNGs again from their JSON

The same JSON gives the same picture. Needs the extra `notebooks` (matplotlib).
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from paged_attention.bench.files import write_bytes
from paged_attention.bench.ladder_plot import draw_ladder
from paged_attention.bench.lengths_plot import draw_lengths
from paged_attention.bench.models_plot import draw_models
from paged_attention.plots.style import DPI

COMMAND = "python -m paged_attention.bench.figures"
# By a JSON's kind, and by what a picture's name adds to the JSON's
FIGURES = {
    "ladder": {"": draw_ladder, "_lengths": draw_lengths},
    "models": {"": draw_models},
    "device": {},
    "published": {},
}


def names(run: dict[str, Any]) -> list[str]:
    """What the names of a run's pictures add to the name of its JSON.

    Raises:  ValueError: a kind that isn't one of FIGURES
    """
    if run.get("kind") not in FIGURES:
        raise ValueError(f'"kind" is {run.get("kind")!r}, should be one of {", ".join(FIGURES)}')
    # A ladder of a single length has no curve, and one without any has no picture.
    return list(FIGURES[run["kind"]])[: len(run.get("contexts", [run]))]


def png(run: dict[str, Any], name: str = "") -> bytes:
    """One picture of a run.

    Args:    run: the dictionary of a JSON
             name: one of `names(run)`
    Returns: the PNG; the same bytes for the same dictionary
    """
    content = io.BytesIO()
    figure = FIGURES[run["kind"]][name](run)
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def draw(source: Path, run: dict[str, Any]) -> list[Path]:
    """Write a run's pictures beside its JSON, in the place of those of an older run.

    Returns: the PNGs written, in order
    Raises:  ValueError: as `names`
    """
    wanted = names(run)
    forget(source)
    paths = [_beside(source, name) for name in wanted]
    for path, name in zip(paths, wanted):
        write_bytes(path, png(run, name))
    return paths


def forget(source: Path) -> None:
    """Delete the pictures beside a JSON."""
    for name in {name for names in FIGURES.values() for name in names}:
        _beside(source, name).unlink(missing_ok=True)


def _beside(source: Path, name: str) -> Path:
    return source.with_name(f"{source.stem}{name}.png")


def redraw(directory: Path) -> list[Path]:
    """Draw the pictures beside every JSON under a folder again.

    Returns: the PNGs written, in order
    Raises:  ValueError: a JSON that isn't a run's, by name. FileNotFoundError: no such folder
    """
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
    """Redraw from the command line.

    Returns: the exit status
    """
    if len(argv) != 1:
        print(f"{COMMAND} takes one folder: figures", file=sys.stderr)
        return 2
    try:
        written = redraw(Path(argv[0]))
    except ImportError:
        print("Figures need matplotlib: pip install -e .[notebooks]", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)) or f"No JSON under {argv[0]}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
