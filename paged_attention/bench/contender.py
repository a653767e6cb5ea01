"""A contender of a decode step (a stage, the kernel, a peer or the floor): checked, then timed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from paged_attention.bench.captions import reason_of
from paged_attention.bench.peers.ours import KernelCall
from paged_attention.bench.progress import Progress
from paged_attention.bench.settings import Settings
from paged_attention.measure.synchronization import Fn
from paged_attention.measure.timing import Trial, in_turns
from paged_attention.measure.units import human_seconds

# A wrong result is far outside of these, a right one well inside; times the largest output.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOLERANCES[torch.float8_e4m3fn] = 1e-5  # of a cache; the query is float32
COUNTS = ("ops", "gemms", "host_reads", "peak_bytes")
LEAST_ROUNDS, MOST_ROUNDS = 3, 10


@dataclass
class Contender:
    """What became of one contender.

    trial: takes its samples; None if it failed or was skipped
    facts: what the JSON says of it beside the trial's figures: "skipped", or "failure" and
           "max_error", the largest difference from the reference
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    trial: Trial | None = None

    def outcome(self) -> str:
        """In a few words, for whoever waits."""
        if self.trial is not None:
            return human_seconds(self.trial.measurement().seconds)
        return next(f"{what}: {why}" for what, why in self.facts.items())

    def as_json(self) -> dict[str, Any]:
        """As it stands in the JSON of a step. A fact replaces a figure of the same name."""
        return {"name": self.name, **(figures(self.trial) if self.trial else {}), **self.facts}


def tried(
    name: str, call: Fn, settings: Settings, expected: torch.Tensor | None = None
) -> Contender:
    """Call a contender, check its result, and time it once. A failure is kept, and isn't timed.

    Args:    name: of the contender
             call: takes no arguments
             settings: where it runs, and the dtype, which decides how far it may be off
             expected: the right result of the first sequences, float64; None: nothing is checked
    """
    facts: dict[str, Any] = {}
    try:
        trial = Trial(call, device=settings.device)
    except Exception as error:  # out of memory, usually; the other contenders may still run
        return Contender(name, {"failure": reason_of(error), "max_error": None})
    result: Any = trial.first_result
    trial.first_result = None
    if expected is not None:
        error = (result[: len(expected)].double() - expected).abs().max().item()
        allowed = TOLERANCES[settings.dtype] * max(1.0, expected.abs().max().item())
        facts["max_error"] = error if math.isfinite(error) else None
        if not error <= allowed:  # NaN is wrong, too
            failure = f"WRONG: off by {error:.2g}, {allowed:.2g} is allowed"
            return Contender(name, {"failure": failure, **facts})
    if not trial.num_samples:
        trial.sample()
    if isinstance(call, KernelCall):  # with the workspace, which later calls find there
        facts["peak_bytes"] = call.first_peak()
    return Contender(name, facts, trial)


def take_turns(
    trials: list[Trial], progress: Progress, turn_seconds: float, budget_seconds: float
) -> None:
    """Sample trials in turns, for a number of rounds.

    Args:    turn_seconds: that a trial samples in its turn; a slow one takes one sample
             budget_seconds: for all rounds, unless LEAST_ROUNDS take longer
    """
    round_seconds = sum(max(trial.measurement().seconds, turn_seconds) for trial in trials)
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_seconds / round_seconds)))
    progress.say(f"{rounds} rounds, about {round_seconds:.1f} s each")
    for number in range(rounds):
        for trial in in_turns(trials, number):
            trial.sample(turn_seconds)
        if round_seconds > 1:
            progress.say(f"round {number + 1} of {rounds}", steps=1)


def figures(trial: Trial) -> dict[str, Any]:
    """The figures of a measurement, its times rounded to a nanosecond."""
    measured = dataclasses.asdict(trial.measurement())
    del measured["device"]  # the whole run has one
    return {
        name: [round(x, 9) for x in value] if isinstance(value, tuple) else round(value, 9)
        for name, value in measured.items()
    }
