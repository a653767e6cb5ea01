"""Progress on stderr: a bar where there are tqdm and a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from typing import Any

_ROUNDS = 10  # how many there will be, until somebody knows


class Progress:
    """A context manager that a run reports to.

    Args:    num_contenders: how many are tried before the rounds, beside the floor
    """

    def __init__(self, num_contenders: int) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        if sys.stderr.isatty():
            self._bar = tqdm(total=1 + num_contenders + _ROUNDS, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """What is happening now."""
        if self._bar is not None:
            self._bar.set_description(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def expect(self, steps: int) -> None:
        """How many steps there will be in all, now that it is known."""
        if self._bar is not None:
            self._bar.total = steps

    def step(self, text: str) -> None:
        """A step is done; "" if it isn't worth a line."""
        if text:
            self.say(text)
        if self._bar is not None:
            self._bar.update()
