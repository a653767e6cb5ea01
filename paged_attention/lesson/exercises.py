"""Exercises with one answer: the reader's value is judged by the notebook's own rule."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any


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
