"""Files that are whole, or not there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path


def refusal(folder: Path, names: tuple[str, ...]) -> str | None:
    """Why `names` can't be written into `folder`, or None. Makes and changes nothing."""
    try:
        return _refusal(folder, names)
    except OSError as error:  # a name that is too long, say
        return str(error)


def _refusal(folder: Path, names: tuple[str, ...]) -> str | None:
    for name in names:
        if (folder / name).is_dir():
            return f"{folder / name} is a folder"
    for place in (folder, *folder.absolute().parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                return f"{place} is not a folder"
            if not os.access(place, os.W_OK | os.X_OK):
                return f"{place} can't be written to"
            return None
    return f"{folder} has no parent"


def write_json(path: Path, data: dict) -> None:
    """The dictionary as JSON, a list of numbers on one line; whole, or not there."""
    text = json.dumps(data, indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m[0].split()), text)
    write_bytes(path, (text + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside it, then rename: a reader sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
