"""A step of a run as a table to read."""

from __future__ import annotations

from typing import Any

from paged_attention.bench.captions import busy, rate, title
from paged_attention.bench.ladder import results_of
from paged_attention.measure.units import human_bytes, human_seconds, ratio

_HEADING = [
    "stage", "time", "quartiles", "compared", "x floor", "predicted",
    "ops", "GEMMs", "host reads", "peak memory",
]  # fmt: skip
KERNEL = "paged_attention_HND"  # with which peers are compared


def table(step: dict[str, Any]) -> str:
    """A line for each stage and each peer, and for what to know of them.

    A stage is compared with the one before it, and a peer with our kernel in the layout HND.

    Args:    step: as `ladder.measure_step` makes it
    """
    floor = step["floor"]
    heading = f"{title(step['seq_lens'])}, K and V {human_bytes(step['kv_bytes'])}"
    if floor:
        heading += (
            f"; floor {human_seconds(floor['seconds'])} to read "
            f"{human_bytes(floor['num_bytes'])} at {rate(floor)}"
        )
    results = results_of(step)
    timed = {result["name"]: result["seconds"] for result in results if "seconds" in result}
    rows, previous = [], None
    for result in results:
        if "seconds" in result:
            is_peer = "note" in result and result["name"] != KERNEL
            other = timed.get(KERNEL) if is_peer else previous
            rows.append(_row(result, step, _compared(result["seconds"], other)))
            previous = result["seconds"]
    notes = [f"{result['name']}  {note}" for result in results if (note := _note(result))]
    if step.get("peers"):
        notes.append(f"Peers are compared with {KERNEL}, and that with the line above it.")
    lines = aligned([_HEADING, *rows]) if rows else []
    return "\n".join([heading, *lines, *notes, *busy(step)])


def _row(result: dict[str, Any], step: dict[str, Any], compared: str) -> list[str]:
    seconds, (low, high) = result["seconds"], result["spread"]
    floor, band = step["floor"], step["predicted_here"].get(result["name"])
    counts = [result[name] for name in ("ops", "gemms", "host_reads")]
    peak = result["peak_bytes"]
    return [
        result["name"],
        human_seconds(seconds),
        f"{human_seconds(low)} - {human_seconds(high)}",
        compared,
        f"{ratio(seconds / floor['seconds'])}x" if floor else "",
        f"{ratio(band[0] / seconds)} - {ratio(band[1] / seconds)}x" if band else "",
        *("" if count is None else f"{count:,}" for count in counts),
        "" if peak is None else human_bytes(peak),
    ]


def _note(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    return result.get("failure") or result.get("note") or ""


def aligned(lines: list[list[str]]) -> list[str]:
    """Rows, the heading first among them: names to the left, figures to the right."""
    first, *others = (max(map(len, column)) for column in zip(*lines))
    return [
        name.ljust(first) + "".join(f"  {cell:>{n}}" for cell, n in zip(cells, others)).rstrip()
        for name, *cells in lines
    ]


def _compared(seconds: float, previous: float | None) -> str:
    """Such as "1.50x faster"; nothing if there is nothing to compare with."""
    if previous is None:
        return ""
    if 0.95 < seconds / previous < 1.05:
        return "the same"
    if seconds <= previous:
        return f"{ratio(previous / seconds)}x faster"
    return f"{ratio(seconds / previous)}x slower"
