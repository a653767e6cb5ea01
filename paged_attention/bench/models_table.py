"""A run over the shapes of real models as a table to read."""

from __future__ import annotations

from typing import Any

from paged_attention.bench.captions import busy
from paged_attention.bench.models import PLANNED
from paged_attention.bench.table import aligned
from paged_attention.measure.units import human_seconds, ratio

CALL, NUMBA = "paged_attention_HND", "paged_attention_numba"
SDPA, VLLM = "gather_sdpa", "vllm_cpu_op"
TIMES = "floor", CALL, PLANNED, NUMBA, SDPA, VLLM
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
HEADING = [
    "model", "batch", "tokens", "cache", "q_len", "floor", "call", "plan.run", "numba",
    "gather, SDPA", "vLLM", "call / SDPA", "run / SDPA", "numba / SDPA", "numba / vLLM",
]  # fmt: skip


def cells(step: dict[str, Any]) -> list[str]:
    """A row of the table. A contender that wasn't timed has an empty cell.

    Args:    step: one of a run's rows
    """
    shape, seconds = step["shape"], seconds_of(step)
    if step["floor"]:
        seconds["floor"] = step["floor"]["seconds"]
    times = [human_seconds(seconds[name]) if name in seconds else "" for name in TIMES]
    ratios = [
        ratio(seconds[ours] / seconds[theirs]) if {ours, theirs} <= seconds.keys() else ""
        for ours, theirs in ((CALL, SDPA), (PLANNED, SDPA), (NUMBA, SDPA), (NUMBA, VLLM))
    ]
    heads = f"{shape['num_heads']}/{shape['num_kv_heads']}/{shape['head_size']}"
    return [
        f"{step['model']} {heads}", f"{step['batch']:,}", f"{step['tokens']:,}",
        SHORT[shape["dtype"]], str(shape["q_len"]), *times, *ratios,
    ]  # fmt: skip


def seconds_of(step: dict[str, Any]) -> dict[str, float]:
    """{contender: median seconds}, of those that were timed."""
    return {one["name"]: one["seconds"] for one in step["peers"] if "seconds" in one}


def table(run: dict[str, Any]) -> str:
    """All rows below their heading, and then what is missing."""
    missing = [f"Left out: {one['row']}: {one['reason']}" for one in run["left_out"]]
    lines = aligned([HEADING, *map(cells, run["rows"])])
    disturbed = [f"{_where(step)}: {line}" for step in run["rows"] for line in busy(step)]
    return "\n".join([*lines, *failures(run), *disturbed, *missing])


def failures(run: dict[str, Any]) -> list[str]:
    """A line for each contender that was wrong or failed."""
    return [
        f"{_where(step)}: {one['name']} {one['failure']}"
        for step in run["rows"]
        for one in step["peers"]
        if "failure" in one
    ]


def _where(step: dict[str, Any]) -> str:
    shape = step["shape"]
    cache = f"{SHORT[shape['dtype']]}, q_len {shape['q_len']}"
    return f"{step['model']}, {step['batch']} x {step['tokens']:,}, {cache}"


def markdown(run: dict[str, Any]) -> str:
    """The same rows for a document."""
    lines = [HEADING, ["---"] + ["--:"] * (len(HEADING) - 1), *map(cells, run["rows"])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
