"""Write files so that each is whole, or not there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def refusal(folder: Path, names: Sequence[str]) -> str | None:
    """Why files of these names can't be written into a folder, or None. Changes nothing."""
    try:
        for name in names:
            if (folder / name).is_dir():
                return f"{folder / name} is a folder"
        for place in (folder, *folder.absolute().parents):
            if place.exists() or place.is_symlink():
                if not place.is_dir():
                    return f"{place} is not a folder"
                writable = os.access(place, os.W_OK | os.X_OK)
                return None if writable else f"{place} can't be written to"
        return f"{folder} has no parent"
    except OSError as error:  # a name that is too long, say
        return str(error)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dictionary as JSON, a list of numbers on one line."""
    text = json.dumps(content, indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_bytes(path, (text + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside the file, then rename, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
