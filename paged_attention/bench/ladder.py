"""A run of the ladder: what the JSON says of the run, and the measurement of one decode step.

At each step the stages, the kernel and, where they are asked for, its peers are checked against a
float64 reference. Then they take turns with each other and with the floor.

A run is one dictionary. It is written to the JSON, and the table and the pictures are made of it
alone. `describe` begins it and has what holds for the whole run. Under "contexts" (one sequence
each) and "batches" (ragged ones) it lists steps, as `StepRun.as_json` makes them. A step has

    "seq_lens", "context"   tokens of each sequence, and of all
    "kv_bytes"              of K and V together
    "other_cores"           how many cores other processes kept busy meanwhile
    "floor"                 a result, "num_bytes" and "gb_per_second"; None if it failed
    "stages", "peers"       results, in order; no "peers" where none were asked for
    "predicted"             {device: {stage: [low, high]}}, seconds; its "floor" beside the stages
    "predicted_here"        {stage or peer: [low, high]}, for this machine
    "published"             rows of figures/published.json that did the same work a KV head

and a result has a "name" and either "skipped", or "failure" and "max_error", or the figures of a
`measure.Measurement` and "max_error"; a peer's has a "note", too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paged_attention.bench.captions import title
from paged_attention.bench.contender import Contender, trial_as_json, tried
from paged_attention.bench.peers import PEERS, Batch, Unavailable, make
from paged_attention.bench.predictions import predictions, predictions_here, published
from paged_attention.bench.progress import Progress
from paged_attention.bench.settings import Settings
from paged_attention.inputs import Inputs
from paged_attention.kernel.plan import plan_decode
from paged_attention.measure import machine
from paged_attention.measure.profiles import DeviceProfile, Figure
from paged_attention.measure.timing import in_turns
from paged_attention.measure.yardstick import FloorReader
from paged_attention.reference import reference_attention

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
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


def results_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    """A step's results: of the stages, the kernel among them, then of the peers."""
    return step["stages"] + step.get("peers", [])


class StepRun:
    """The measurement of one decode step.

    `as_json` holds at any moment, so that an interrupted run keeps what was measured until then.

    Args:    settings: the sizes, and who takes part
             seq_lens: tokens of each sequence
             profile: of this device, calibrated
    """

    def __init__(
        self, settings: Settings, seq_lens: Sequence[int], profile: DeviceProfile
    ) -> None:
        self.settings, self.seq_lens, self.profile = settings, tuple(seq_lens), profile
        self.num_tokens = sum(seq_lens)
        self.title = title(self.seq_lens)
        self.contenders: dict[str, Contender] = {}  # as far as they were tried
        self._other_load = machine.OtherLoad()

    def run(self, progress: Progress) -> None:
        """Try every contender once, then let all take turns."""
        settings = self.settings
        progress.say(f"{self.title}: filling the cache")
        inputs = settings.inputs(self.seq_lens)
        self.floor = FloorReader(settings.kv_bytes(self.num_tokens), device=settings.device)
        self._keep(tried("floor", self.floor, settings), progress)
        progress.say(f"{self.title}: computing the float64 reference")
        expected = expected_of(inputs, settings)
        for name in settings.stages:
            stage = tried(name, settings.call(name, inputs), settings, expected)
            self._keep(stage, progress)
        if settings.peers:
            batch = Batch(inputs, settings.scale)
            for name in settings.peers:
                self._keep(_tried_peer(name, batch, settings, expected), progress)
        self._take_turns(progress)

    def _keep(self, contender: Contender, progress: Progress) -> None:
        self.contenders[contender.name] = contender
        progress.step(f"{self.title}: {contender.name} {contender.outcome()}")

    def _take_turns(self, progress: Progress) -> None:
        trials = [one.trial for one in self.contenders.values() if one.trial is not None]
        round_seconds = sum(max(t.measurement().seconds, _TURN_SECONDS) for t in trials)
        rounds = min(_MOST_ROUNDS, int(_BUDGET_SECONDS / round_seconds))
        rounds = max(_LEAST_ROUNDS, rounds)
        progress.say(f"{self.title}: {rounds} rounds, about {round_seconds:.1f} s each")
        progress.expect(len(self.contenders) + rounds)
        self._other_load = machine.OtherLoad()
        for number in range(rounds):
            for trial in in_turns(trials, number):
                trial.sample(_TURN_SECONDS)
            progress.step(f"round {number + 1} of {rounds}" if round_seconds > 1 else "")

    def as_json(self) -> dict[str, Any]:
        """What the JSON says of this step, see above."""
        others = self._other_load.cores()
        step = {
            "context": self.num_tokens,
            "seq_lens": list(self.seq_lens),
            "kv_bytes": self.settings.kv_bytes(self.num_tokens),
            "other_cores": None if others is None else round(others, 2),
            "floor": self._floor_as_json(),
            "stages": self._results(self.settings.stages),
            "predicted": predictions(self.settings, self.seq_lens),
            "predicted_here": predictions_here(self.settings, self.seq_lens, self.profile),
            "published": published(self.settings, self.seq_lens),
        }
        if self.settings.peers:
            step["peers"] = self._results(self.settings.peers)
        return step

    def _floor_as_json(self) -> dict[str, Any] | None:
        trial = self.contenders["floor"].trial
        if trial is None:
            return None
        figures = trial_as_json(trial)
        rate = round(self.floor.num_bytes / figures["seconds"] / 1e9, 3)
        return {"num_bytes": self.floor.num_bytes, **figures, "gb_per_second": rate}

    def _results(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [self.contenders[name].as_json() for name in names if name in self.contenders]

    @property
    def has_failures(self) -> bool:
        return any(contender.failure is not None for contender in self.contenders.values())

    @property
    def has_results(self) -> bool:
        """Whether there is more than the floor."""
        return len(self.contenders) > 1


def _tried_peer(name: str, batch: Batch, settings: Settings, expected: torch.Tensor) -> Contender:
    try:
        call, note = make(name, batch)
    except Unavailable as reason:
        return Contender(name, skipped=str(reason))
    peer = tried(name, call, settings, expected)
    peer.note, peer.counted = note, not PEERS[name].compiled
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
