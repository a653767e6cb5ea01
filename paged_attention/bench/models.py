"""A run over the shapes of real models: what their decode steps cost, ours beside what others do.

Each row is one decode step. A run is one dictionary, and the table and the picture are made of it
alone. Under "rows" it lists steps of the form that `ladder` describes. Each has a "shape" of its
own instead of the run's, a "model", a "batch", "tokens" of each sequence, and its contenders under
"peers". Under "left_out" stand the rows that weren't measured, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paged_attention.bench.captions import reason_of
from paged_attention.bench.contender import take_turns, tried
from paged_attention.bench.ladder import tried_peer
from paged_attention.bench.peers import Batch
from paged_attention.bench.peers.ours import planned_hnd
from paged_attention.bench.progress import Progress
from paged_attention.bench.settings import Settings
from paged_attention.inputs import Inputs, random_inputs
from paged_attention.kernel.fp8 import FLOAT8S
from paged_attention.measure import machine
from paged_attention.measure.units import human_bytes
from paged_attention.measure.yardstick import FloorReader
from paged_attention.reference import reference_attention

# Query heads, KV heads, head size, as each model's config.json on Hugging Face has them.
MODELS = {
    "Qwen2.5-0.5B": (14, 2, 64),
    "Gemma-2B": (8, 1, 256),
    "Llama-2-7B": (32, 32, 128),
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B": (64, 8, 128),
}
PEERS = (
    "paged_attention_HND",
    "paged_attention_numba",
    "gather_sdpa",
    "vllm_cpu_op",
)  # and PLANNED
PLANNED = "planned_HND"  # a run of a plan that was made beforehand
BLOCK_SIZE = 16
# The caches of one row. The floor, the check and vLLM's operation take as much again, each.
MOST_BYTES = 1.1e9
CHECKED = 4  # sequences of a batch that are held against the float64 reference
_TURN_SECONDS = 0.02
_BUDGET_SECONDS = 2.0  # for a row's rounds, unless the least number of rounds takes longer


class Row(NamedTuple):
    """A decode step: sequences of equal length, and what their caches hold."""

    batch: int
    tokens: int
    dtype: torch.dtype = torch.float32
    q_len: int = 1


FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Every batch and length in float32, and the other dtypes and four query tokens at two of them.
ROWS = (
    *(Row(batch, tokens) for batch in (1, 16, 256) for tokens in (128, 1024, 8192)),
    *(Row(1, 8192, dtype) for dtype in (FP16, BF16, FP8)),
    *(Row(16, 1024, dtype) for dtype in (FP16, BF16, FP8)),
    *(Row(1, 1024, q_len=4), Row(16, 1024, q_len=4)),
)


def describe(device: str) -> dict[str, Any]:
    """The dictionary of a run that has no results yet."""
    machine_of = machine.describe(device)
    return {
        "kind": "models", "schema": 1, **machine_of, "interrupted": False, "rows": [],
        "left_out": [],
    }  # fmt: skip


def measure_models(run: dict[str, Any], names: Sequence[str], device: str) -> None:
    """Add every row of these models to the run.

    Args:    names: of MODELS
    """
    rows = [(name, row) for name in names for row in ROWS]
    with Progress(len(rows)) as progress:
        for name, row in rows:
            settings = _settings(name, row, device)
            label = f"{name}, {row.batch} x {row.tokens:,}, {_dtype(row)}, q_len {row.q_len}"
            progress.say(label, steps=1)
            held, reason = settings.kv_bytes(row.batch * row.tokens), ""
            if held > MOST_BYTES:
                reason = f"K and V take {human_bytes(held)}, more than {human_bytes(MOST_BYTES)}"
            else:
                try:
                    run["rows"].append(_measured(name, row, settings, progress))
                except Exception as error:  # no memory for the inputs, say; others may still run
                    reason = reason_of(error)
            if reason:
                run["left_out"].append({"row": label, "reason": reason})


def _settings(name: str, row: Row, device: str) -> Settings:
    heads, kv_heads, head_size = MODELS[name]
    return Settings(device, heads, kv_heads, head_size, BLOCK_SIZE, row.dtype, peers=PEERS)


def _measured(name: str, row: Row, settings: Settings, progress: Progress) -> dict[str, Any]:
    inputs = _inputs(row, settings)
    batch, expected = Batch(inputs, settings.scale, "HND"), _expected(inputs)
    read = FloorReader(settings.kv_bytes(row.batch * row.tokens), device=settings.device)
    contenders = {"floor": tried("floor", read, settings)}
    contenders["floor"].facts["num_bytes"] = read.num_bytes
    contenders[PLANNED] = tried(PLANNED, planned_hnd(batch), settings, expected)
    for peer in PEERS:
        contenders[peer] = tried_peer(peer, batch, settings, expected)
    load = machine.OtherLoad()
    trials = [one.trial for one in contenders.values() if one.trial]
    take_turns(trials, progress, _TURN_SECONDS, _BUDGET_SECONDS)
    results = {name: contender.as_json() for name, contender in contenders.items()}
    return {
        "model": name,
        "batch": row.batch,
        "tokens": row.tokens,
        "shape": {**settings.sizes, "dtype": _dtype(row), "q_len": row.q_len, "layout": "HND"},
        "context": row.batch * row.tokens,
        "seq_lens": [row.tokens] * row.batch,
        "kv_bytes": settings.kv_bytes(row.batch * row.tokens),
        "other_cores": load.cores(),
        "floor": results["floor"] if contenders["floor"].trial else None,
        "stages": [],
        "peers": [result for name, result in results.items() if name != "floor"],
    }


def _inputs(row: Row, settings: Settings) -> Inputs:
    is_fp8 = row.dtype in FLOAT8S
    inputs = random_inputs(
        [row.tokens] * row.batch, dtype=torch.float32 if is_fp8 else row.dtype, layout="HND",
        device=settings.device, **settings.sizes,
    )  # fmt: skip
    if is_fp8:
        key, value = (cache.to(row.dtype) for cache in (inputs.key_cache, inputs.value_cache))
        inputs = inputs._replace(key_cache=key, value_cache=value)
    if row.q_len > 1:
        query = torch.stack([inputs.query.roll(i, dims=-1) for i in range(row.q_len)], dim=1)
        inputs = inputs._replace(query=query)
    return inputs


def _expected(inputs: Inputs) -> torch.Tensor:
    """The float64 reference of the first sequences."""
    query, key, value, tables, lens = inputs
    first = query[:CHECKED], key, value, tables[:CHECKED], lens[:CHECKED]
    return reference_attention(*first, layout="HND")[0]


def _dtype(row: Row) -> str:
    return str(row.dtype).removeprefix("torch.")
