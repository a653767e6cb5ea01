"""A contender of a decode step (a stage, the kernel, a peer or the floor): checked, then timed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from paged_attention.bench.captions import reason_of
from paged_attention.bench.peers.ours import KernelCall
from paged_attention.bench.settings import Settings
from paged_attention.measure.synchronization import Fn
from paged_attention.measure.timing import Trial

# A wrong result is far outside of these, a right one well inside; times the largest output.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Contender:
    """What became of one contender. It has a trial, or else it failed, or else it was skipped.

    trial:      takes its samples
    failure:    the error's first line, or "WRONG: ..."
    skipped:    the reason, of a peer that can't run here
    max_error:  the largest difference from the reference; None: there is no number
    first_peak: bytes that a first call allocates, its workspace included; of our kernel only
    note:       on a peer
    counted:    False: its operations are inside compiled code and can't be counted
    """

    name: str
    trial: Trial | None = None
    failure: str | None = None
    skipped: str | None = None
    max_error: float | None = None
    first_peak: int | None = None
    note: str | None = None
    counted: bool = True

    def outcome(self) -> str:
        """In a few words, for whoever waits."""
        if self.trial is not None:
            return f"{self.trial.measurement().seconds * 1e3:.3g} ms"
        if self.skipped is not None:
            return f"skipped, {self.skipped}"
        failure = self.failure or ""
        return failure if failure.startswith("WRONG") else f"FAILED, {failure}"

    def as_json(self) -> dict[str, Any]:
        """As it stands in the JSON of a step."""
        if self.skipped is not None:
            return {"name": self.name, "skipped": self.skipped}
        result: dict[str, Any] = {"name": self.name}
        if self.trial is None:
            result["failure"] = self.failure
        else:
            result |= trial_as_json(self.trial)
            if self.first_peak is not None:
                result["peak_bytes"] = self.first_peak
            if not self.counted:
                result |= dict.fromkeys(("ops", "gemms", "host_reads", "peak_bytes"))
        result["max_error"] = self.max_error
        if self.note is not None:
            result["note"] = self.note
        return result


def tried(
    name: str, call: Fn, settings: Settings, expected: torch.Tensor | None = None
) -> Contender:
    """Call a contender, check its result, and time it once. A failure is kept, and isn't timed.

    Args:    name: of the contender
             call: takes no arguments
             settings: where it runs, and the dtype, which decides how far it may be off
             expected: the right result, float64; None: nothing is checked
    """
    contender = Contender(name)
    try:
        trial = Trial(call, device=settings.device)
    except Exception as error:  # out of memory, usually; the other contenders may still run
        contender.failure = reason_of(error)
        return contender
    result: Any = trial.first_result
    trial.first_result = None
    if expected is not None:
        error = (result.double() - expected).abs().max().item()
        allowed = TOLERANCES[settings.dtype] * max(1.0, expected.abs().max().item())
        contender.max_error = error if math.isfinite(error) else None
        if not error <= allowed:  # NaN is wrong, too
            contender.failure = f"WRONG: off by {error:.2g}, {allowed:.2g} is allowed"
            return contender
    if not trial.num_samples:
        trial.sample()
    contender.trial = trial
    if isinstance(call, KernelCall):
        contender.first_peak = call.first_peak()
    return contender


def trial_as_json(trial: Trial) -> dict[str, Any]:
    """The figures of a measurement, its times rounded to a nanosecond."""
    figures = dataclasses.asdict(trial.measurement())
    del figures["device"]  # the whole run has one
    return {
        name: [round(x, 9) for x in value] if isinstance(value, tuple) else round(value, 9)
        for name, value in figures.items()
    }
