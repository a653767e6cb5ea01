"""Progress on stderr: a bar where there is tqdm and a terminal, plain lines otherwise."""

from __future__ import annotations

import sys


def progress_of(num_stages: int):
    """A context manager to report to: .say(text) for news, .step(text) for a step done ("" for
    one that isn't worth a line), .expect(steps) once it's known how many there will be."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _Lines()
    return _Bar(tqdm, num_stages) if sys.stderr.isatty() else _Lines()


class _Lines:
    """Progress as lines on stderr."""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def expect(self, steps: int) -> None:
        pass

    def step(self, text: str) -> None:
        if text:
            self.say(text)


class _Bar:
    """Progress as a bar, where there is tqdm and a terminal."""

    def __init__(self, tqdm, num_stages: int) -> None:
        self.bar = tqdm(total=1 + num_stages + 10, disable=None, leave=False)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.bar.close()

    def say(self, text: str) -> None:
        self.bar.set_description(text)

    def expect(self, steps: int) -> None:
        self.bar.total = steps

    def step(self, text: str) -> None:
        if text:
            self.bar.set_description(text, refresh=False)
        self.bar.update()
