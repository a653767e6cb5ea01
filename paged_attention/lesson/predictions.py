"""Commit, then see: what the reader expected, beside the formula and the count."""

from __future__ import annotations

from paged_attention.measure.units import ratio


def see(what: str, committed: float | None, **others: float) -> None:
    """Print the reader's number beside the others. The last one is what turned out.

    Args:    what: the quantity and its unit
             committed: the reader's number, or None
             others: numbers by name, such as formula= and counted=
    Raises:  TypeError: committed is neither a number nor None

    Example:
        >>> see("operations", None, formula=29, counted=29)
        operations: you said nothing yet, formula 29, counted 29
        >>> see("operations", 58, formula=29, counted=29)
        operations: you said 58 (2.00 times), formula 29, counted 29
    """
    words = "nothing yet"
    if committed is not None:
        if isinstance(committed, bool) or not isinstance(committed, (int, float)):
            raise TypeError(f"{what}: write a number for your prediction, not {committed!r}")
        words = _shown(committed)
        turned_out = list(others.values())[-1]
        words += f" ({ratio(committed / turned_out)} times)" if turned_out else ""
    rest = ", ".join(f"{name} {_shown(value)}" for name, value in others.items())
    print(f"{what}: you said {words}, {rest}")


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else ratio(value)
