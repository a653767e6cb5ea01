"""Numbers in words: 12.3 ms, 819 MB, 1,234."""

from __future__ import annotations


def ratio(value: float) -> str:
    """A number in three digits, without an exponent.

    Example:
        >>> ratio(0.123), ratio(12.34), ratio(1234)
        ('0.12', '12.3', '1,234')
    """
    return f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 0 if value >= 99.95 else 1 if value >= 9.995 else 2


def human_seconds(seconds: float) -> str:
    """A time in three digits and a unit.

    Example:
        >>> human_seconds(0.01234), human_seconds(87.06e-6)
        ('12.3 ms', '87.1 us')
    """
    return _in_units(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def human_bytes(num_bytes: float) -> str:
    """A size in three digits and a unit, in powers of ten.

    Example:
        >>> human_bytes(819_200_000), human_bytes(640)
        ('819 MB', '640 B')
    """
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    return _in_units(num_bytes, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3})


def _in_units(value: float, sizes: dict[str, float]) -> str:
    """In the largest unit that `value` reaches once rounded, or else in the smallest."""
    reached = [unit for unit, size in sizes.items() if value >= 0.9995 * size]
    unit = reached[0] if reached else list(sizes)[-1]
    value /= sizes[unit]
    return f"{value:.{_decimals(value)}f} {unit}"
