"""`python -m paged_attention`: the ladder on this machine, as a table, pictures and their JSON.

    python -m paged_attention --device cuda --context 1024,32768 --dtype fp16 --out figures/my-card
    python -m paged_attention --peers
    python -m paged_attention --models

Every stage is checked against a float64 reference, then timed in turns with the others. With
--peers, so is what others do with the same data, each where it can run. With --models, our kernel
and others take steps of real models' shapes instead.

The exit status is 0; 1 if a stage or a peer was wrong or failed; 2 for a bad option; 130 after
Ctrl-C, and then what was measured until then is kept.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from paged_attention.bench import ladder, models, models_table
from paged_attention.bench.arguments import COMMAND, parse, refuse
from paged_attention.bench.captions import hardware, reason_of, title, workload
from paged_attention.bench.figures import draw, forget
from paged_attention.bench.files import refusal, uninterrupted, write_json
from paged_attention.bench.memory import too_large
from paged_attention.bench.settings import Settings, ragged, ragged_lengths
from paged_attention.bench.table import table
from paged_attention.measure.calibration import calibrate
from paged_attention.measure.profiles import DeviceProfile

FILES = {
    "ladder": ("ladder.json", "ladder.png", "ladder_lengths.png"),
    "models": ("models.json", "models.png"),
}
FOR_PICTURES = "For its pictures: python -m paged_attention.bench.figures"
LENGTHS = 1024, 8192, 32_768, 100_000  # contexts where none is asked for


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, write.

    Returns: the exit status
    """
    settings, contexts, names, out = parse(argv)
    kind = "models" if names else "ladder"
    reason = refusal(out, FILES[kind])
    if reason:
        refuse(f"--out {out}: {reason}")
    if names:
        run = models.describe(settings.device)
        measure = partial(_measure_models, run, names, settings.device)
    else:
        contexts = _contexts(settings, contexts)
        profile = calibrate(settings.device)
        run = ladder.describe(settings, profile)
        measure = partial(_measure, run, settings, contexts, profile)
    print(f"{hardware(run)}\n{'' if names else workload(run)}".rstrip(), flush=True)
    failed = False
    try:
        failed = measure()
    except KeyboardInterrupt:
        run["interrupted"] = True
    if not ladder.steps_of(run):
        reason = "Interrupted before anything" if run["interrupted"] else "Nothing"
        print(f"{reason} was measured.", file=sys.stderr)
        return 130 if run["interrupted"] else 1
    try:
        _write(run, out / FILES[kind][0])
    except OSError as error:
        print(f"{COMMAND}: --out {out}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted: the JSON is whole. {FOR_PICTURES} {out}", file=sys.stderr)
        return 130
    if run["interrupted"]:
        print("Interrupted: the table and the JSON hold what was measured.", file=sys.stderr)
        return 130
    return 1 if failed else 0


def _contexts(settings: Settings, asked: list[int] | None) -> list[int]:
    """The contexts that were asked for, or those of LENGTHS that fit the memory."""
    contexts = []
    for n in dict.fromkeys(asked or LENGTHS):
        reason = too_large(settings, [n])
        if reason and (asked or not contexts):
            refuse(f"--context {n} {reason}")
        if reason:
            print(f"Left out: {n:,} tokens, which {reason}.", flush=True)
        else:
            contexts.append(n)
    return contexts


def _measure(
    run: dict[str, Any], settings: Settings, contexts: list[int], profile: DeviceProfile
) -> bool:
    """Add every step to the run, and print its table. Says whether a contender failed."""
    steps = [("contexts", settings, [n]) for n in contexts]
    if settings.peers:
        steps.append(("batches", ragged(settings), [*ragged_lengths()]))
    failed = False
    for kind, settings, seq_lens in steps:
        reason = too_large(settings, seq_lens)
        if reason:  # of the ragged batch, which nobody asked for
            print(f"\n{title(seq_lens)}: skipped, {reason}", flush=True)
            continue
        kept: list[dict[str, Any]] = []
        try:
            ladder.measure_step(settings, seq_lens, profile, kept)
        except Exception as error:  # no memory for the inputs, say; other steps may still run
            print(f"\n{title(seq_lens)}: FAILED, {reason_of(error)}", flush=True)
            failed = True
        finally:
            run[kind] += kept
            for step in kept:
                print(f"\n{table(step)}", flush=True)
                failed |= any("failure" in r for r in ladder.results_of(step)) or not step["floor"]
    return failed


def _measure_models(run: dict[str, Any], names: list[str], device: str) -> bool:
    """Add every row to the run, and print its table. Says whether a contender failed."""
    try:
        models.measure_models(run, names, device)
    finally:
        if run["rows"]:
            print(f"\n{models_table.table(run)}", flush=True)
    return bool(models_table.failures(run))


def _write(run: dict[str, Any], path: Path) -> None:
    """The JSON, and its pictures where matplotlib is installed. Prints what was written."""
    with uninterrupted():
        write_json(path, run)
        forget(path)  # the pictures of an older run
    print(f"\n{path}")
    try:
        print("\n".join(map(str, draw(path, run))))
    except ImportError:
        print(f"{FOR_PICTURES} {path.parent}, after pip install -e .[notebooks]")
