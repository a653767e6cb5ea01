"""The ladder: every stage and the final kernel, checked, then timed against the floor.

A run gives one dictionary, which is what the JSON beside the picture holds (`report.write_json`),
and all that the table (`report.table`) and the picture (`plots.ladder`) are drawn from. Where
peers are asked for, they are checked and timed with the stages, in the same turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from paged_attention.bench.captions import title
from paged_attention.bench.peers import ours_and_sdpa as peers
from paged_attention.bench.peers.ours_and_sdpa import reason_of
from paged_attention.bench.predictions import predictions, predictions_here
from paged_attention.bench.settings import Settings, rung
from paged_attention.inputs import Inputs
from paged_attention.kernel.plan import plan_decode
from paged_attention.measure import machine
from paged_attention.measure.profiles import DeviceProfile, Figure
from paged_attention.measure.timing import Trial, in_turns
from paged_attention.measure.yardstick import FloorReader
from paged_attention.reference import reference_attention

# A wrong stage is far outside of these, a right one well inside; times the largest output.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

_ROUNDS = 3, 10  # at least and at most
_TURN_SECONDS = 0.02  # that a stage samples in its turn, once at least
_BUDGET_SECONDS = 40.0  # for a step's rounds, as far as 3 of them allow


def describe(settings: Settings, profile: DeviceProfile) -> dict:
    """The dictionary of a run, without results yet.

    Args: profile: of this device, calibrated; what the predictions beside the results are made of
    """
    kernel = plan_decode(
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_size=settings.head_size,
        block_size=settings.block_size,
        layout="vllm",
        dtype=settings.dtype,
        device=settings.device,
        seq_lens=[],
    )
    figures = {f.name: getattr(profile, f.name) for f in dataclasses.fields(profile)}
    return {
        "kind": "ladder",
        "schema": 1,
        **machine.describe(settings.device),
        "shape": {
            "num_seqs": 1,
            "num_heads": settings.num_heads,
            "num_kv_heads": settings.num_kv_heads,
            "head_size": settings.head_size,
            "block_size": settings.block_size,
            "partition_size": settings.partition_size,
            "kernel_partition_size": kernel.partition_size,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "layout": "vllm",
        },
        "profile": {
            name: [figure.low, figure.high]
            for name, figure in figures.items()
            if isinstance(figure, Figure)
        },
        "interrupted": False,
        "contexts": [],
        "batches": [],
    }


class StepRun:
    """The measurement of all stages, and peers, at one decode step. `entry()` is valid at any
    moment: after an interrupt it holds what was measured until then.

    Args: seq_lens: tokens of each sequence
          profile: of this device, calibrated
    """

    def __init__(
        self, settings: Settings, seq_lens: Sequence[int], profile: DeviceProfile
    ) -> None:
        self.settings, self.seq_lens, self.profile = settings, tuple(seq_lens), profile
        self.num_tokens = sum(seq_lens)
        self.title = title(self.seq_lens)
        self.trials: dict[str, Trial] = {}  # "floor" among them
        self.max_errors: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.skipped: dict[str, str] = {}  # peers, with the reason
        self.notes: dict[str, str] = {}  # on peers
        self.first_peaks: dict[str, int] = {}  # of calls of the kernel, the workspace included
        self.other_load = machine.OtherLoad()

    def run(self, progress) -> None:
        """Check every stage and time it once, then let all take turns.

        Args: progress: .say(text) for news, .step(text) for a step done, .expect(n) for how many
                   steps there will be
        """
        settings = self.settings
        progress.say(f"{self.title}: filling the cache")
        inputs = settings.inputs(self.seq_lens)
        reader = FloorReader(settings.kv_bytes(self.num_tokens), device=settings.device)
        self.floor_bytes = reader.num_bytes
        self._try("floor", reader, progress)
        progress.say(f"{self.title}: computing the float64 reference")
        expected = _expected(inputs, settings)
        for name in settings.stages:
            self._try(name, rung(name, inputs, settings), progress, expected)
        if settings.peers:
            self._try_peers(inputs, progress, expected)

        round_seconds = sum(
            max(trial.measurement().seconds, _TURN_SECONDS) for trial in self.trials.values()
        )
        least, most = _ROUNDS
        rounds = max(least, min(most, int(_BUDGET_SECONDS / round_seconds)))
        progress.say(f"{self.title}: {rounds} rounds, about {round_seconds:.1f} s each")
        progress.expect(1 + len(settings.stages) + len(settings.peers) + rounds)
        self.other_load = machine.OtherLoad()
        for number in range(1, rounds + 1):
            for trial in in_turns(self.trials.values(), number - 1):
                trial.sample(_TURN_SECONDS)
            progress.step(f"round {number} of {rounds}" if round_seconds > 1 else "")

    def _try_peers(self, inputs, progress, expected) -> None:
        settings = self.settings
        data = peers.Data(inputs, settings.scale)
        for name in settings.peers:
            try:
                call, self.notes[name] = peers.make(name, data)
            except peers.Unavailable as reason:
                self.skipped[name] = str(reason)
                progress.step(f"{self.title}: {name} skipped, {reason}")
            else:
                self._try(name, call, progress, expected)

    def _try(self, name: str, fn: Callable, progress, expected=None) -> None:
        """Call it, check it, time it once; a failure is kept, and is not timed."""
        try:
            trial = Trial(fn, device=self.settings.device)
        except Exception as error:  # out of memory, usually: the other stages may still run
            self.failures[name] = reason_of(error)
            progress.step(f"{self.title}: {name} FAILED, {self.failures[name]}")
            return
        result, trial.first_result = trial.first_result, None
        if expected is not None:
            error = (result.double() - expected).abs().max().item()
            allowed = TOLERANCES[self.settings.dtype] * max(1.0, expected.abs().max().item())
            self.max_errors[name] = error
            if not error <= allowed:  # NaN is wrong, too
                self.failures[name] = f"WRONG: off by {error:.2g}, {allowed:.2g} is allowed"
                progress.step(f"{self.title}: {name} {self.failures[name]}")
                return
        if not trial.num_samples:
            trial.sample()
        self.trials[name] = trial
        if isinstance(fn, peers.KernelCall):
            self.first_peaks[name] = fn.first_peak()
        progress.step(f"{self.title}: {name} {trial.measurement().seconds * 1e3:.3g} ms")

    def entry(self) -> dict:
        """The JSON of this step: floor, stages in order, failures included, predictions, and
        peers where they were asked for, the skipped ones included."""
        stages = [self._result(name) for name in self.settings.stages if self._is_done(name)]
        others = self.other_load.cores()
        floor = None
        if "floor" in self.trials:
            floor = {"num_bytes": self.floor_bytes, **_as_json(self.trials["floor"])}
            floor["gb_per_second"] = round(self.floor_bytes / floor["seconds"] / 1e9, 3)
        entry = {
            "context": self.num_tokens,
            "seq_lens": list(self.seq_lens),
            "kv_bytes": self.settings.kv_bytes(self.num_tokens),
            "other_cores": None if others is None else round(others, 2),
            "floor": floor,
            "stages": stages,
            "predicted": predictions(self.settings, self.seq_lens),
            "predicted_here": predictions_here(self.settings, self.seq_lens, self.profile),
        }
        if self.settings.peers:
            done = filter(self._is_done, self.settings.peers)
            entry["peers"] = [self._peer_result(name) for name in done]
        return entry

    def has_results(self) -> bool:
        """Whether there is more than the floor."""
        return any(map(self._is_done, (*self.settings.stages, *self.settings.peers)))

    def _is_done(self, name: str) -> bool:
        return name in self.trials or name in self.failures or name in self.skipped

    def _result(self, name: str) -> dict:
        if name in self.failures:
            result = {"failure": self.failures[name]}
        else:
            result = _as_json(self.trials[name])
            if name in self.first_peaks:
                result["peak_bytes"] = self.first_peaks[name]
        error = self.max_errors.get(name)
        finite = error is not None and error < float("inf")
        return {"name": name, **result, "max_error": error if finite else None}

    def _peer_result(self, name: str) -> dict:
        if name in self.skipped:
            return {"name": name, "skipped": self.skipped[name]}
        result = {**self._result(name), "note": self.notes[name]}
        if peers.PEERS[name].compiled and name in self.trials:  # nothing inside can be counted
            result |= dict.fromkeys(("ops", "gemms", "host_reads", "peak_bytes"))
        return result


def _expected(inputs: Inputs, settings: Settings) -> torch.Tensor:
    """The float64 reference, one KV head at a time: a fourth of the memory for four."""
    group = settings.num_heads // settings.num_kv_heads
    outs = [
        reference_attention(
            inputs.query[:, group * head : group * (head + 1)],
            inputs.key_cache[:, head : head + 1],
            inputs.value_cache[:, head : head + 1],
            inputs.block_tables,
            inputs.seq_lens,
            layout="vllm",
        )[0]
        for head in range(settings.num_kv_heads)
    ]
    return torch.cat(outs, dim=1)


def _as_json(trial: Trial) -> dict:
    m = trial.measurement()
    return {
        "seconds": round(m.seconds, 9),
        "spread": [round(s, 9) for s in m.spread],
        "cold_seconds": round(m.cold_seconds, 9),
        "runs": m.runs,
        "ops": m.ops,
        "gemms": m.gemms,
        "host_reads": m.host_reads,
        "peak_bytes": m.peak_bytes,
        "samples": [round(s, 9) for s in m.samples],
    }
