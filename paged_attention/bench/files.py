"""Write files so that each is whole, or not there."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def refusal(folder: Path, names: Sequence[str]) -> str | None:
    """Why files of these names can't be written into a folder, or None.

    A megabyte is written there and taken away again, and so are the folders that it takes.
    """
    made: list[Path] = []
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
    except (FileExistsError, NotADirectoryError) as error:
        return f"{error.filename} is not a folder"
    except OSError as error:
        return f"it can't be written to: {error.strerror}"
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()
    taken = [folder / name for name in names if (folder / name).is_dir()]
    return f"{taken[0]} is a folder" if taken else None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing inside this block, which must be short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
