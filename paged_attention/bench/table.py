"""A ladder run as a table to read."""

from __future__ import annotations

from paged_attention.bench.captions import busy, title
from paged_attention.measure.units import human_bytes, human_seconds, ratio

_COLUMNS = (
    ("stage", "<"),
    ("time", ">"),
    ("quartiles", ">"),
    ("vs previous", ">"),
    ("x floor", ">"),
    ("predicted", ">"),
    ("ops", ">"),
    ("GEMMs", ">"),
    ("host reads", ">"),
    ("peak memory", ">"),
)


def table(entry: dict) -> str:
    """A step's results as text: a line for each stage, for each peer, for each ratio."""
    rows, notes, previous = [], [], None
    floor, predicted = entry["floor"], entry["predicted_here"]
    for stage in entry["stages"]:
        if "failure" in stage:
            notes.append(f"{stage['name']}  {stage['failure']}")
            continue
        rows.append(_row(stage, floor, predicted, _against(stage["seconds"], previous)))
        previous = stage["seconds"]
    for peer in entry.get("peers", []):
        if "seconds" in peer:
            rows.append(_row(peer, floor, predicted, ""))
            if peer["note"]:
                notes.append(f"{peer['name']}  {peer['note']}")
        else:
            reason = peer["failure"] if "failure" in peer else f"skipped: {peer['skipped']}"
            notes.append(f"{peer['name']}  {reason}")
    lines = [f"{title(entry['seq_lens'])}, K and V {human_bytes(entry['kv_bytes'])}"]
    if floor:
        lines[0] += (
            f"; floor {human_seconds(floor['seconds'])} to read "
            f"{human_bytes(floor['num_bytes'])} at {floor['gb_per_second']:.1f} GB/s"
        )
    if rows:
        lines += _aligned(rows)
    return "\n".join(lines + notes + ratios(entry) + busy(entry))


def _row(result: dict, floor: dict | None, predicted: dict, against: str) -> tuple[str, ...]:
    seconds, (low, high) = result["seconds"], result["spread"]
    band = [ratio(bound / seconds) for bound in predicted.get(result["name"], ())]
    counts = (result[name] for name in ("ops", "gemms", "host_reads"))
    peak = result["peak_bytes"]
    return (
        result["name"],
        human_seconds(seconds),
        f"{human_seconds(low)} - {human_seconds(high)}",
        against,
        f"{ratio(seconds / floor['seconds'])}x" if floor else "",
        f"{' - '.join(band)}x" if band else "",
        *("" if count is None else f"{count:,}" for count in counts),
        "" if peak is None else human_bytes(peak),
    )


# What the kernel is held against: each takes the first's time over the second's, layouts alike.
_HELD_AGAINST = (
    ("paged_attention", "fused_phase2"),
    ("paged_attention_HND", "gather_sdpa"),
    ("paged_attention_HND", "dense_sdpa"),
    ("paged_attention_HND", "flex_paged"),
    ("paged_attention_HND", "vllm_cpu_op"),
    ("paged_attention_NHD", "paged_attention_HND"),
    ("paged_attention", "paged_attention_HND"),
)


def ratios(entry: dict) -> list[str]:
    """A line for each pair of which both were timed; none where there are no peers."""
    if not entry.get("peers"):
        return []
    results = entry["stages"] + entry["peers"]
    seconds = {result["name"]: result["seconds"] for result in results if "seconds" in result}
    pairs = [pair for pair in _HELD_AGAINST if seconds.keys() >= set(pair)]
    width = max((len(f"{one} / {other}") for one, other in pairs), default=0)
    return [
        f"{f'{one} / {other}':<{width}}  {ratio(seconds[one] / seconds[other]):>5}  "
        f"{_against(seconds[one], seconds[other])}"
        for one, other in pairs
    ]


def _aligned(rows) -> list[str]:
    header = tuple(name for name, _ in _COLUMNS)
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, (_, side), width in zip(row, _COLUMNS, widths)
        ).rstrip()
        for row in (header, *rows)
    ]


def _against(seconds: float, previous: float | None) -> str:
    if previous is None:
        return ""
    if 0.95 < seconds / previous < 1.05:
        return "the same"
    if seconds <= previous:
        return f"{ratio(previous / seconds)}x faster"
    return f"{ratio(seconds / previous)}x slower"
