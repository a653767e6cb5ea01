"""A ladder as a Markdown table, the one in the README: time against length, in a few columns.

python -m paged_attention.bench.markdown figures/amd-epyc-avx2/ladder.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paged_attention.bench.captions import hardware, workload
from paged_attention.measure.units import human_bytes, human_seconds

COLUMNS = {
    "naive_loops": "`naive_loops`",
    "single_bmm": "`single_bmm`",
    "fused_phase2": "`fused_phase2`",
    "paged_attention": "kernel, vLLM's layout",
    "paged_attention_HND": "kernel, `HND`",
    "gather_sdpa": "gather, SDPA",
    "vllm_cpu_op": "vLLM's CPU kernel",
}


def table(source: str) -> str:
    """What a ladder's JSON holds, of COLUMNS and the floor: medians, then the memory that the
    longest takes; a blank where something wasn't timed, or can't be counted.

    Args: source: the JSON's path, which the caption links to
    """
    data = json.loads(Path(source).read_text(encoding="utf-8"))
    entries = sorted(data["contexts"], key=lambda entry: entry["context"])
    longest = entries[-1]
    rows = [
        ["tokens", "floor", *COLUMNS.values()],
        ["--:"] * (2 + len(COLUMNS)),
        *(_times(entry) for entry in entries),
        _peaks(longest),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    caption = (
        f"*Time of one decode step: medians of the samples in [`{Path(source).name}`]({source}). "
        f"{hardware(data)}; {workload(data)}.*"
    )
    return "\n".join([*lines, "", caption])


def _times(entry: dict) -> list[str]:
    results = _by_name(entry)
    floor = human_seconds(entry["floor"]["seconds"]) if entry["floor"] else ""
    times = [results.get(name, {}).get("seconds") for name in COLUMNS]
    return [f"{entry['context']:,}", floor, *(human_seconds(t) if t else "" for t in times)]


def _peaks(entry: dict) -> list[str]:
    results = _by_name(entry)
    peaks = [results.get(name, {}).get("peak_bytes") for name in COLUMNS]
    kv = f"(K, V: {human_bytes(entry['kv_bytes'])})"
    return [
        f"peak memory, {entry['context']:,}",
        kv,
        *(human_bytes(p) if p else "" for p in peaks),
    ]


def _by_name(entry: dict) -> dict[str, dict]:
    return {result["name"]: result for result in entry["stages"] + entry.get("peers", [])}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python -m paged_attention.bench.markdown takes one JSON of a ladder")
    print(table(sys.argv[1]))
