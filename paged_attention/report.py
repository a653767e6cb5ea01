"""What a ladder run leaves: a table to read, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

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


def hardware(data: dict) -> str:
    """One line: the device, its threads, the versions."""
    device, versions = data["device"], data["versions"]
    parts = [device["name"]]
    if device["type"] == "cpu":
        capability = f", {device['cpu_capability']}" if device["cpu_capability"] else ""
        parts[0] += f" ({device['threads']} threads{capability})"
    elif versions.get("cuda"):
        parts.append(f"CUDA {versions['cuda']}")
    return ", ".join([*parts, f"torch {versions['torch']}"])


def workload(data: dict) -> str:
    """One line: the shape that was measured."""
    shape = data["shape"]
    kernels = shape.get("kernel_partition_size", shape["partition_size"])  # one in older runs
    parts = f"{shape['partition_size']:,}"
    if kernels != shape["partition_size"]:
        parts += f", of {kernels:,} in paged_attention"
    return (
        f"1 sequence, {shape['num_heads']} query heads, {shape['num_kv_heads']} KV heads, "
        f"head size {shape['head_size']}, {shape['dtype']}, block size {shape['block_size']}, "
        f"partitions of {parts}"
    )


def title(seq_lens) -> str:
    """A batch in a few words: "1,024 tokens"."""
    if len(seq_lens) == 1:
        return f"{seq_lens[0]:,} tokens"
    return (
        f"{len(seq_lens)} sequences of {min(seq_lens):,} to {max(seq_lens):,} tokens, "
        f"{sum(seq_lens):,} in all"
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


def busy(entry: dict) -> list[str]:
    """What to know of the machine while it measured: nothing, if other processes left it alone."""
    others = entry["other_cores"]
    if others is None or others < 0.1:
        return []
    return [f"Other processes used {others:.1f} cores meanwhile: these times are too long."]


def _aligned(rows) -> list[str]:
    header = tuple(name for name, _ in _COLUMNS)
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, (_, side), width in zip(row, _COLUMNS, widths)
        ).rstrip()
        for row in (header, *rows)
    ]


def listed(numbers) -> str:
    """1,024, 8,192 and 100,000"""
    *others, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(others)} and {last}" if others else last


def _against(seconds: float, previous: float | None) -> str:
    if previous is None:
        return ""
    if 0.95 < seconds / previous < 1.05:
        return "the same"
    if seconds <= previous:
        return f"{ratio(previous / seconds)}x faster"
    return f"{ratio(seconds / previous)}x slower"


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


# -- files --------------------------------------------------------------------------------------


def refusal(folder: Path, names: tuple[str, ...]) -> str | None:
    """Why `names` can't be written into `folder`, or None. Makes and changes nothing."""
    try:
        return _refusal(folder, names)
    except OSError as error:  # a name that is too long, say
        return str(error)


def _refusal(folder: Path, names: tuple[str, ...]) -> str | None:
    for name in names:
        if (folder / name).is_dir():
            return f"{folder / name} is a folder"
    for place in (folder, *folder.absolute().parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                return f"{place} is not a folder"
            if not os.access(place, os.W_OK | os.X_OK):
                return f"{place} can't be written to"
            return None
    return f"{folder} has no parent"


def write_json(path: Path, data: dict) -> None:
    """The dictionary as JSON, a list of numbers on one line; whole, or not there."""
    text = json.dumps(data, indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m[0].split()), text)
    write_bytes(path, (text + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside it, then rename: a reader sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
