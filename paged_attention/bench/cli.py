"""`python -m paged_attention`: the ladder on this machine, as a table, a picture and its JSON.

    python -m paged_attention --device cuda --context 1024,32768 --dtype fp16 --out figures/my-card
    python -m paged_attention --peers

Every stage is checked against a float64 reference, then timed in turns with the others; with
--peers, so is what others do with the same data, each where it can run. The exit status is 0, 1 if
a stage or a peer was wrong or failed, 2 for a bad option, 130 after Ctrl-C (what was
measured until then is kept).
"""

from __future__ import annotations

import sys
from pathlib import Path

from paged_attention.bench.arguments import (
    LENGTHS,
    LONGEST,
    SHORT,
    Parser,
    parser_of_options,
    settings_of,
)
from paged_attention.bench.captions import hardware, workload
from paged_attention.bench.files import refusal, write_json
from paged_attention.bench.ladder import StepRun, describe
from paged_attention.bench.memory import USABLE, longest_context, needed_bytes
from paged_attention.bench.progress import progress_of
from paged_attention.bench.settings import Settings, ragged, ragged_lengths
from paged_attention.bench.table import table
from paged_attention.measure.calibration import calibrate
from paged_attention.measure.machine import available_bytes
from paged_attention.measure.units import human_bytes, listed

FILES = "ladder.json", "ladder.png", "ladder_lengths.png"


def main(argv: list[str] | None = None) -> int:
    """Parse, plan, measure, write. Returns the exit status."""
    parser = parser_of_options()
    options = parser.parse_args(argv)
    settings = settings_of(parser, options)
    out = Path(options.out)
    reason = refusal(out, FILES)
    if reason:
        parser.error(f"--out {out}: {reason}")
    contexts = _contexts(parser, options, settings)

    profile = calibrate(settings.device)
    data = describe(settings, profile)
    print(f"{hardware(data)}\n{workload(data)}", flush=True)
    steps = [("contexts", settings, (context,)) for context in contexts]
    if settings.peers:
        steps.append(("batches", ragged(settings), ragged_lengths()))
    failed, run = False, None
    try:
        for kind, settings, seq_lens in steps:
            run = StepRun(settings, seq_lens, profile)
            if kind == "batches" and not _fits(settings, seq_lens):
                print(f"\n{run.title}: skipped, more than the memory holds", flush=True)
                continue
            with progress_of(len(settings.stages) + len(settings.peers)) as progress:
                run.run(progress)
            failed = failed or bool(run.failures)
            _keep(data[kind], run)
            run = None
    except KeyboardInterrupt:
        data["interrupted"] = True
        if run is not None and run.has_results():
            _keep(data[kind], run)
        if not data["contexts"]:
            print("Interrupted before anything was measured.", file=sys.stderr)
            return 130

    try:
        write_json(out / FILES[0], data)
        print(f"\n{out / FILES[0]}")
        _draw(data, out / FILES[0])
    except OSError as error:
        print(f"python -m paged_attention: --out {out}: {error}", file=sys.stderr)
        return 1
    if data["interrupted"]:
        print("Interrupted: the table and the JSON hold what was measured.", file=sys.stderr)
        return 130
    return 1 if failed else 0


def _keep(entries: list[dict], run: StepRun) -> None:
    entries.append(run.entry())
    print(f"\n{table(entries[-1])}", flush=True)


def _fits(settings: Settings, seq_lens: tuple[int, ...]) -> bool:
    return needed_bytes(settings, seq_lens)[0] <= USABLE * available_bytes(settings.device)


def _draw(data: dict, source: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(
            f"For its pictures: pip install -e .[notebooks], "
            f"then python -m paged_attention.bench.figures {source.parent}"
        )
        return
    from paged_attention.bench.figures import draw

    print("\n".join(map(str, draw(source, data))))


def _contexts(parser: Parser, options, settings: Settings) -> list[int]:
    """What was asked for if it fits, or what of the default's does; says which and why."""
    free = available_bytes(settings.device)
    usable = int(USABLE * free)
    memory = f"{human_bytes(usable)} usable ({USABLE:.0%} of what is free)"
    if options.context:
        for context in options.context:
            least = 2 * settings.kv_bytes(context)
            if least > usable:
                parser.error(
                    f"--context {context} needs more than {human_bytes(least)} "
                    f"for K and V and the floor's copy; {memory}"
                )
            needed, largest = needed_bytes(settings, (context,))
            if needed > usable:
                parser.error(
                    f"--context {context} needs {human_bytes(needed)}, most of it for "
                    f"{largest}; {memory}"
                )
        return list(dict.fromkeys(options.context))

    print(f"Counting what {LONGEST:,} tokens need", file=sys.stderr, flush=True)
    longest = longest_context(settings, usable, LONGEST)
    short = min(SHORT, longest) if longest >= SHORT else longest_context(settings, usable, SHORT)
    if not short:
        needed, largest = needed_bytes(settings, (SHORT,))
        parser.error(
            f"--context {SHORT} needs {human_bytes(needed)}, most of it for {largest}; "
            f"{memory}: pass a shorter one"
        )
    between = [length for length in LENGTHS if 2 * length <= longest]
    contexts = sorted({short, *between, longest} - {0})
    needed, largest = needed_bytes(settings, (contexts[-1],))
    line = (
        f"Contexts: {listed(contexts)} tokens; the longest needs "
        f"{human_bytes(needed)}, most of it for {largest}; {memory}"
    )
    if longest < LONGEST:
        needed, _ = needed_bytes(settings, (LONGEST,))
        line += f"; {LONGEST:,} would need {human_bytes(needed)}"
    print(line + ".", flush=True)
    return contexts
