"""Progress on stderr: a bar where there are tqdm and a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """A context manager that a run reports to.

    Args:    steps: how many there will be, at most
    """

    def __init__(self, steps: int) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        if sys.stderr.isatty():
            self._bar = tqdm(total=steps, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str, *, steps: int = 0) -> None:
        """What is happening now, or what has been done in so many steps."""
        if self._bar is not None:
            self._bar.set_description(text)
            self._bar.update(steps)
        else:
            print(text, file=sys.stderr, flush=True)
