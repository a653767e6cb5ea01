"""What a notebook needs to teach: check a number without printing it, show what changed.

What is printed is the same on every machine, so that a notebook's stored output can be compared
with a fresh run's, character by character.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import linecache
import reprlib
from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt
from types import ModuleType
from typing import Any

SERIES = (
    "paged_kv_cache",
    "naive_loops",
    "batched_gather",
    "single_bmm",
    "gqa_broadcast",
    "single_tile",
    "fused_phase2",
    "grid_even_share",
    "final_kernel",
    "one_decode_step",
    "real_model",
)

_OPERATORS = {"<": lt, "<=": le, "==": eq, ">=": ge, ">": gt}
_VARIANTS = itertools.count(1)


def check(label: str, value: Any, op: str, bound: Any) -> None:
    """Assert `value op bound` and print the claim, never the value.

    A measured error differs from machine to machine. The bound that it must keep does not.

    Args:    label: what the value is
             value: a number, or a tensor of one element; NaN fails every check
             op: "<", "<=", "==", ">=" or ">"
             bound: a number; with "==", also a tuple, a string, ...
    Raises:  AssertionError: the claim is wrong; names the value and the bound
             ValueError: op is none of the five

    Example:
        >>> check("max|err|", 3.7e-7, "<=", 1e-5)
        max|err| <= 1e-05  ok
    """
    if op not in _OPERATORS:
        raise ValueError(f"op is {op!r}; it should be one of {', '.join(_OPERATORS)}")
    value, bound = _plain(value), _plain(bound)
    if not _OPERATORS[op](value, bound):
        raise AssertionError(f"{label}: {value!r} is not {op} {bound!r}")
    print(f"{label} {op} {bound!r}  ok")


def check_fails(label: str, value: Any, op: str, bound: Any) -> None:
    """Show that a wrong value is caught: `check` with the same arguments must raise.

    Args:    as for `check`
    Raises:  AssertionError: the check passes, so it would not have caught the mistake

    Example:
        >>> check_fails("max|err|", 0.2, "<=", 1e-5)
        max|err| <= 1e-05  fails: caught
    """
    if _OPERATORS[op](_plain(value), _plain(bound)):
        raise AssertionError(f"{label}: the check passes with {_plain(value)!r} {op} {bound!r}")
    print(f"{label} {op} {_plain(bound)!r}  fails: caught")


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


def exercise(name: str, answer: Any, is_right: Callable[[Any], object]) -> None:
    """Judge a reader's answer to an exercise and print the verdict.

    Args:    name: of the exercise
             answer: whatever the reader made; None if it hasn't been tried
             is_right: called with the answer; says whether it is right
    Raises:  AssertionError: the answer is wrong, or can't be checked; names it

    Example:
        >>> exercise("bytes of a block", None, lambda n: n == 8192)
        bytes of a block: not tried yet
        >>> exercise("bytes of a block", 8192, lambda n: n == 8192)
        bytes of a block: right
    """
    if answer is None:
        print(f"{name}: not tried yet")
        return
    shown = reprlib.repr(answer)
    try:
        right = bool(is_right(answer))
    except Exception as error:
        kind = type(answer).__name__
        raise AssertionError(f"{name}: a {kind} can't be checked, {shown}: {error}") from error
    if not right:
        raise AssertionError(f"{name}: {shown} is not right, try again")
    print(f"{name}: right")


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


def _plain(x: Any) -> Any:
    """The number in a tensor of one element; anything else as it is."""
    return x.item() if hasattr(x, "item") else x


def _text(module_or_function: Any) -> list[str]:
    """The lines of the file or the cell that defines it."""
    lines, _ = inspect.findsource(module_or_function)
    return [line.rstrip("\n") for line in lines]
