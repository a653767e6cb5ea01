"""Numbers in words: 12.3 ms, 819 MB, 1,024 and 8,192."""

from __future__ import annotations


def listed(numbers) -> str:
    """1,024, 8,192 and 100,000"""
    *others, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(others)} and {last}" if others else last


def ratio(value: float) -> str:
    return f"{value:,.{_digits(value)}f}"


def _digits(value: float) -> int:
    """Decimals that make three digits of it."""
    return 0 if value >= 99.95 else 1 if value >= 9.995 else 2


def human_seconds(seconds: float) -> str:
    """12.3 ms, 1.24 s, 87.1 us: three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size or unit == "us":
            value = seconds / size
            return f"{value:.{_digits(value)}f} {unit}"
    raise AssertionError("unreachable")


def human_bytes(num_bytes: float) -> str:
    """819 MB, 1.23 GB: three digits, powers of ten."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)):
        value = num_bytes / size
        if value < 999.5 or unit == "TB":
            return f"{value:.{_digits(value)}f} {unit}"
    raise AssertionError("unreachable")
