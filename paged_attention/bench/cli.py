"""`python -m paged_attention`: the ladder on this machine, as a table, pictures and their JSON.

    python -m paged_attention --device cuda --context 1024,32768 --dtype fp16 --out figures/my-card
    python -m paged_attention --peers

Every stage is checked against a float64 reference, then timed in turns with the others. With
--peers, so is what others do with the same data, each where it can run.

The exit status is 0; 1 if a stage or a peer was wrong or failed; 2 for a bad option; 130 after
Ctrl-C, and then what was measured until then is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paged_attention.bench.arguments import COMMAND, parse, refuse
from paged_attention.bench.captions import hardware, workload
from paged_attention.bench.figures import draw
from paged_attention.bench.files import refusal, write_json
from paged_attention.bench.ladder import StepRun, describe
from paged_attention.bench.memory import (
    contexts_that_fit,
    needed_bytes,
    require_that_they_fit,
    usable_bytes,
)
from paged_attention.bench.progress import Progress
from paged_attention.bench.settings import Settings, ragged, ragged_lengths
from paged_attention.bench.table import table
from paged_attention.measure.calibration import calibrate

FILES = "ladder.json", "ladder.png", "ladder_lengths.png"


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, write.

    Returns: the exit status
    """
    settings, contexts, out = parse(argv)
    reason = refusal(out, FILES)
    if reason:
        refuse(f"--out {out}: {reason}")
    try:
        if contexts is None:
            contexts = contexts_that_fit(settings)
        else:
            require_that_they_fit(settings, contexts)
    except ValueError as too_long:
        refuse(str(too_long))

    run, failed = _measure(settings, list(dict.fromkeys(contexts)))
    if not run["contexts"]:
        print("Interrupted before anything was measured.", file=sys.stderr)
        return 130
    try:
        _write(run, out / FILES[0])
    except OSError as error:
        print(f"{COMMAND}: --out {out}: {error}", file=sys.stderr)
        return 1
    if run["interrupted"]:
        print("Interrupted: the table and the JSON hold what was measured.", file=sys.stderr)
        return 130
    return 1 if failed else 0


def _measure(settings: Settings, contexts: list[int]) -> tuple[dict[str, Any], bool]:
    """The run's dictionary, and whether a contender failed. Prints a table for each step."""
    profile = calibrate(settings.device)
    run = describe(settings, profile)
    print(f"{hardware(run)}\n{workload(run)}", flush=True)
    steps = [(run["contexts"], StepRun(settings, [n], profile)) for n in contexts]
    if settings.peers:
        batch = StepRun(ragged(settings), ragged_lengths(), profile)
        steps.append((run["batches"], batch))
    failed = False
    for kept, step in steps:
        try:
            if kept is run["batches"] and not _fits(step):
                print(f"\n{step.title}: skipped, more than the memory holds", flush=True)
                continue
            with Progress(len(step.settings.stages) + len(step.settings.peers)) as progress:
                step.run(progress)
            kept.append(step.as_json())
        except KeyboardInterrupt:
            run["interrupted"] = True
            if not step.has_results:
                break
            kept.append(step.as_json())
        failed = failed or step.has_failures
        print(f"\n{table(kept[-1])}", flush=True)
        if run["interrupted"]:
            break
    return run, failed


def _fits(step: StepRun) -> bool:
    needed, _ = needed_bytes(step.settings, step.seq_lens)
    return needed <= usable_bytes(step.settings.device)


def _write(run: dict[str, Any], path: Path) -> None:
    """The JSON, and its pictures where matplotlib is installed. Prints what was written."""
    write_json(path, run)
    print(f"\n{path}")
    try:
        print("\n".join(map(str, draw(path, run))))
    except ImportError:
        print(
            f"For its pictures: pip install -e .[notebooks], "
            f"then python -m paged_attention.bench.figures {path.parent}"
        )
