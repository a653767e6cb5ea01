"""A run as a Markdown table, the one in the README: time against length, in a few columns.

.venv/bin/python tests/tools/readme_table.py figures/amd-epyc-avx2/ladder.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_attention.bench.captions import hardware, workload
from paged_attention.bench.ladder import results_of
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
    """Medians of a run in COLUMNS, beside the floor, and the memory that the longest takes.

    A cell is empty where something wasn't timed, or can't be counted.

    Args:    source: the path of the run's JSON, which the caption links to
    """
    run = json.loads(Path(source).read_text(encoding="utf-8"))
    steps = sorted(run["contexts"], key=lambda step: step["context"])
    longest = steps[-1]
    rows = [
        ["tokens", "floor", *COLUMNS.values()],
        ["--:"] * (2 + len(COLUMNS)),
        *(
            [f"{step['context']:,}", _floor(step), *_cells(step, "seconds", human_seconds)]
            for step in steps
        ),
        [
            f"peak memory, {longest['context']:,}",
            f"(K, V: {human_bytes(longest['kv_bytes'])})",
            *_cells(longest, "peak_bytes", human_bytes),
        ],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    caption = (
        f"*Time of one decode step: medians of the samples in [`{Path(source).name}`]({source}). "
        f"{hardware(run)}; {workload(run)}.*"
    )
    return "\n".join([*lines, "", caption])


def _floor(step: dict[str, Any]) -> str:
    return human_seconds(step["floor"]["seconds"]) if step["floor"] else ""


def _cells(step: dict[str, Any], figure: str, in_words: Callable[[float], str]) -> list[str]:
    figures = {result["name"]: result.get(figure) for result in results_of(step)}
    return [in_words(x) if (x := figures.get(name)) else "" for name in COLUMNS]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("readme_table.py takes one JSON of a run")
    print(table(sys.argv[1]))
