"""A step of a run as a table to read."""

from __future__ import annotations

from typing import Any

from paged_attention.bench.captions import busy, title
from paged_attention.bench.ladder import results_of
from paged_attention.measure.units import human_bytes, human_seconds, ratio

_HEADING = [
    "stage", "time", "quartiles", "vs previous", "x floor", "predicted",
    "ops", "GEMMs", "host reads", "peak memory",
]  # fmt: skip
# What the kernel is compared with: each pair takes the first's time over the second's. Layouts are
# alike, except in the last two pairs, which compare layouts.
_PAIRS = (
    ("paged_attention", "fused_phase2"),
    ("paged_attention_HND", "gather_sdpa"),
    ("paged_attention_HND", "dense_sdpa"),
    ("paged_attention_HND", "flex_paged"),
    ("paged_attention_HND", "vllm_cpu_op"),
    ("paged_attention_NHD", "paged_attention_HND"),
    ("paged_attention", "paged_attention_HND"),
)


def table(step: dict[str, Any]) -> str:
    """A line for each stage, for each peer, for what to know of them, and for each ratio.

    Args:    step: as `ladder.StepRun.as_json` makes it
    """
    floor = step["floor"]
    heading = f"{title(step['seq_lens'])}, K and V {human_bytes(step['kv_bytes'])}"
    if floor:
        heading += (
            f"; floor {human_seconds(floor['seconds'])} to read "
            f"{human_bytes(floor['num_bytes'])} at {floor['gb_per_second']:.1f} GB/s"
        )
    rows, notes, previous = [], [], None
    for result in results_of(step):
        is_peer = "note" in result
        if "seconds" in result:
            compared = "" if is_peer else _compared(result["seconds"], previous)
            rows.append(_row(result, step, compared))
            previous = result["seconds"]
        note = _note(result)
        notes += [f"{result['name']}  {note}"] if note else []
    lines = _aligned(rows) if rows else []
    return "\n".join([heading, *lines, *notes, *_ratios(step), *busy(step)])


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


def _aligned(rows: list[list[str]]) -> list[str]:
    """The rows below their heading, names to the left, figures to the right."""
    lines = [_HEADING, *rows]
    first, *others = (max(map(len, column)) for column in zip(*lines))
    return [
        name.ljust(first) + "".join(f"  {cell:>{n}}" for cell, n in zip(cells, others)).rstrip()
        for name, *cells in lines
    ]


def _ratios(step: dict[str, Any]) -> list[str]:
    """A line for each pair that was timed; none where there are no peers."""
    if not step.get("peers"):
        return []
    seconds = {r["name"]: r["seconds"] for r in results_of(step) if "seconds" in r}
    pairs = {
        f"{one} / {other}": (seconds[one], seconds[other])
        for one, other in _PAIRS
        if one in seconds and other in seconds
    }
    width = max(map(len, pairs), default=0)
    return [
        f"{names:<{width}}  {ratio(one / other):>5}  {_compared(one, other)}"
        for names, (one, other) in pairs.items()
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
