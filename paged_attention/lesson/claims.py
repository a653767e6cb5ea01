"""Claims: check a number and print its bound, never the number.

What is printed is the same on every machine, so that a notebook's stored output can be compared
with a fresh run's, character by character.
"""

from __future__ import annotations

from operator import eq, ge, gt, le, lt
from typing import Any

_OPERATORS = {"<": lt, "<=": le, "==": eq, ">=": ge, ">": gt}


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


def _plain(x: Any) -> Any:
    """The number in a tensor of one element; anything else as it is."""
    return x.item() if hasattr(x, "item") else x
