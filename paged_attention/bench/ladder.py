"""A run of the ladder: what the JSON says of the run, and the measurement of one decode step.

At each step the stages, the kernel and, where they are asked for, its peers are checked against a
float64 reference. Then they take turns with each other and with the floor.

A run is one dictionary. It is written to the JSON, and the table and the pictures are made of it
alone. `describe` begins it and has what holds for the whole run. Under "contexts" (one sequence
each) and "batches" (ragged ones) it lists steps, as `measure_step` adds them. A step has

    "seq_lens", "context"   tokens of each sequence, and of all
    "kv_bytes"              of K and V together
    "other_cores"           how many cores other processes kept busy meanwhile
    "floor"                 a result, and "num_bytes" that it reads; None if it failed
    "stages", "peers"       results, in order; no "peers" where none were asked for
    "predicted"             {device: {stage: [low, high]}}, seconds; its "floor" beside the stages
    "predicted_here"        {stage or peer: [low, high]}, for this machine
    "published"             rows of figures/published.json that did the same work a KV head

and a result has a "name" and either "skipped", or "failure" and "max_error", or the figures of a
`timing.Measurement` and "max_error"; a peer's has a "note", too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paged_attention.bench.captions import title
from paged_attention.bench.contender import COUNTS, MOST_ROUNDS, Contender, take_turns, tried
from paged_attention.bench.peers import PEERS, Batch, Unavailable, make
from paged_attention.bench.predictions import predictions, predictions_here, published
from paged_attention.bench.progress import Progress
from paged_attention.bench.settings import Settings
from paged_attention.inputs import Inputs
from paged_attention.kernel.plan import plan_decode
from paged_attention.measure import machine
from paged_attention.measure.profiles import DeviceProfile, Figure
from paged_attention.measure.yardstick import FloorReader
from paged_attention.reference import reference_attention

_TURN_SECONDS = 0.02  # that a contender samples in its turn; a slow one takes one sample
_BUDGET_SECONDS = 40.0  # for a step's rounds, unless the least number of rounds takes longer


def describe(settings: Settings, profile: DeviceProfile) -> dict[str, Any]:
    """The dictionary of a run that has no results yet.

    Args:    settings: what will be measured
             profile: of this device, calibrated; the predictions beside the results come from it
    """
    kernel = plan_decode(
        layout="vllm", dtype=settings.dtype, device=settings.device, seq_lens=[], **settings.sizes
    )
    return {
        "kind": "ladder",
        "schema": 1,
        **machine.describe(settings.device),
        "shape": {
            "num_seqs": 1,
            **settings.sizes,
            "partition_size": settings.partition_size,
            "kernel_partition_size": kernel.partition_size,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "layout": "vllm",
        },
        "profile": {
            name: [figure.low, figure.high]
            for name, figure in vars(profile).items()
            if isinstance(figure, Figure)
        },
        "interrupted": False,
        "contexts": [],
        "batches": [],
    }


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's steps, whatever its kind."""
    return [step for kind in ("contexts", "batches", "rows") for step in run.get(kind, [])]


def results_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    """A step's results: of the stages, the kernel among them, then of the peers."""
    return step["stages"] + step.get("peers", [])


def measure_step(
    settings: Settings,
    seq_lens: Sequence[int],
    profile: DeviceProfile,
    kept: list[dict[str, Any]],
) -> None:
    """Measure one decode step: try every contender once, then let all take turns.

    Args:    settings: the sizes, and who takes part
             seq_lens: tokens of each sequence
             profile: of this device, calibrated
             kept: a run's steps. This one is added even if an error or Ctrl-C ends it, with what
                   was measured until then, unless that is nothing but the floor
    """
    contenders: dict[str, Contender] = {}
    step: dict[str, Any] = {
        "context": sum(seq_lens),
        "seq_lens": list(seq_lens),
        "kv_bytes": settings.kv_bytes(sum(seq_lens)),
        "predicted": predictions(settings, seq_lens),
        "predicted_here": predictions_here(settings, seq_lens, profile),
        "published": published(settings, seq_lens),
    }
    load = machine.OtherLoad()
    try:
        with Progress(1 + len(settings.stages) + len(settings.peers) + MOST_ROUNDS) as progress:
            for contender in _tried_in_order(settings, seq_lens, progress):
                contenders[contender.name] = contender
                progress.say(f"{title(seq_lens)}: {contender.name} {contender.outcome()}", steps=1)
            load = machine.OtherLoad()  # without that of compiling peers
            trials = [one.trial for one in contenders.values() if one.trial]
            take_turns(trials, progress, _TURN_SECONDS, _BUDGET_SECONDS)
    finally:
        results = {name: contender.as_json() for name, contender in contenders.items()}
        if len(results) > 1:
            step["other_cores"] = load.cores()
            step["floor"] = results["floor"] if contenders["floor"].trial else None
            step["stages"] = [results[name] for name in settings.stages if name in results]
            if settings.peers:
                step["peers"] = [results[name] for name in settings.peers if name in results]
            kept.append(step)


def _tried_in_order(
    settings: Settings, seq_lens: Sequence[int], progress: Progress
) -> Iterator[Contender]:
    progress.say(f"{title(seq_lens)}: filling the cache")
    inputs = settings.inputs(seq_lens)
    read = FloorReader(settings.kv_bytes(sum(seq_lens)), device=settings.device)
    floor = tried("floor", read, settings)
    floor.facts["num_bytes"] = read.num_bytes
    yield floor
    progress.say(f"{title(seq_lens)}: computing the float64 reference")
    expected = expected_of(inputs, settings)
    for name in settings.stages:
        yield tried(name, settings.call(name, inputs), settings, expected)
    if settings.peers:
        batch = Batch(inputs, settings.scale)
        for name in settings.peers:
            yield tried_peer(name, batch, settings, expected)


def tried_peer(name: str, batch: Batch, settings: Settings, expected: torch.Tensor) -> Contender:
    """`tried`, for a peer. One that can't run here is skipped, with its reason."""
    try:
        call, note = make(name, batch)
    except Unavailable as reason:
        return Contender(name, {"skipped": str(reason)})
    peer = tried(name, call, settings, expected)
    peer.facts["note"] = note
    if PEERS[name].compiled and peer.trial:
        peer.facts |= dict.fromkeys(COUNTS)
    return peer


def expected_of(inputs: Inputs, settings: Settings) -> torch.Tensor:
    """The float64 reference. It takes one KV head at a time, which needs less memory."""
    by_head = zip(*(tensor.chunk(settings.num_kv_heads, dim=1) for tensor in inputs[:3]))
    tables, lens = inputs.block_tables, inputs.seq_lens
    outs = [
        reference_attention(query, key, value, tables, lens, layout="vllm")[0]
        for query, key, value in by_head
    ]
    return torch.cat(outs, dim=1)
