"""What changes between two stages, and what a change to a stage does."""

from __future__ import annotations

import difflib
import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_VARIANTS = itertools.count(1)


def variant(function: Callable[..., Any], edits: Mapping[str, str]) -> Callable[..., Any]:
    """A stage with pieces of its text replaced, to see what a mistake or an idea does.

    Args:    function: its file or its notebook cell holds it whole, imports included; a variant
                   will do, too
             edits: {piece: what to put there}; each piece stands in the text once
    Returns: the function of the same name that the changed text defines; `show_diff` shows the
             change
    Raises:  ValueError: a piece that doesn't stand there once
    """
    text = "\n".join(_text(function)) + "\n"
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"a piece must stand in {function.__name__} once, got {old!r}")
        text = text.replace(old, new)
    filename = f"<variant {next(_VARIANTS)} of {function.__name__}>"
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    names: dict[str, Any] = {"__name__": filename}
    exec(compile(text, filename, "exec"), names)
    return names[function.__name__]


def show_diff(
    before: ModuleType | Callable[..., Any], after: ModuleType | Callable[..., Any]
) -> None:
    """Print what changed between two stages, as a unified diff of their whole texts.

    Args:    before, after: a module, or a function, which stands for the file or the notebook
                   cell that defines it
    """
    lines = difflib.unified_diff(_text(before), _text(after), n=1, lineterm="")
    body = list(lines)[2:]  # without the two header lines
    for line in body[1:]:  # ... and without the first separator
        print("..." if line.startswith("@@") else line.rstrip())


def _text(module_or_function: Any) -> list[str]:
    """The lines of the file or the cell that defines it."""
    lines, _ = inspect.findsource(module_or_function)
    return [line.rstrip("\n") for line in lines]
