"""Let a command finish its work when nobody can read what it prints, or after Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TextIO


def run(command: Callable[[], int]) -> int:
    """Call a command with streams that never raise.

    Args:    command: returns its exit status
    Returns: the command's exit status; 1 where that is 0, but a disk was too full for its output.
             A pipe whose reader left, as `head` does, is no failure. 130 after Ctrl-C
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    out, err = LastingStream(sys.stdout), LastingStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = command()
        except KeyboardInterrupt:
            print("Interrupted before anything was measured.", file=sys.stderr)
            return 130
        if out.error and not isinstance(out.error, BrokenPipeError):
            print(f"What was to be printed is lost: {out.error}", file=sys.stderr)
            return status or 1
    return status


class LastingStream:
    """Writes to a stream as long as that works, and then to nowhere.

    Args:    stream: None, as Python has it for a closed one: all goes to nowhere
    """

    error: OSError | None = None  # why the stream can't be written to any more

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = stream or open(os.devnull, "w")
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="backslashreplace")  # of what it can't encode

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self.error = error
            # Python flushes what is left at exit, and that must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return len(text)

    def flush(self) -> None:
        pass  # nothing is held back

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
