"""Whether a run's JSON can be believed: what to ask of one that somebody sends in.

python -m paged_attention.bench.check figures/my-card/ladder.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paged_attention.bench.contender import TOLERANCES
from paged_attention.bench.ladder import results_of, steps_of
from paged_attention.measure.yardstick import kv_bytes

COMMAND = "python -m paged_attention.bench.check"
_SAME = 2e-9  # seconds; times in a JSON are rounded to a nanosecond


def problems(run: Any) -> list[str]:
    """What is wrong with the JSON of a ladder or of models, a line each. None if it is believable.

    A run names its machine and its versions, but no path. Each step holds as many bytes as its
    sizes say, the floor reads no fewer, and nothing is faster than the floor. A median is that of
    its samples, and what was timed was right.

    Example:
        >>> problems({"kind": "ladder", "schema": 2})
        ['"schema" is 2, should be 1']
    """
    for name, known in {"kind": ("ladder", "models"), "schema": (1,)}.items():
        got = run.get(name) if isinstance(run, dict) else run
        if got not in known:
            return [f'"{name}" is {got!r}, should be {" or ".join(map(repr, known))}']
    try:
        return [
            *_of_the_machine(run),
            *(p for step in steps_of(run) for p in _of_a_step(run, step)),
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return [f"something is missing or of another type: {type(error).__name__}: {error}"]


def _of_the_machine(run: dict[str, Any]) -> Iterator[str]:
    for section, name in (("device", "name"), ("versions", "torch"), ("versions", "python")):
        value = run[section][name]
        if not (isinstance(value, str) and value.strip()):
            yield f"{section}.{name} is {value!r}, should say what was measured"
    if not steps_of(run):
        yield "no step was measured"
    for name, (low, high) in run.get("profile", {}).items():
        if not 0 <= low <= high:
            yield f"profile.{name} is [{low}, {high}], should go from low to high"
    for text in _texts(run):
        if text.startswith(("/", "~")) or ":\\" in text:
            yield f"{text!r} is a path of the machine"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _of_a_step(run: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
    shape, floor = step.get("shape") or run["shape"], step["floor"]
    where = f"{step.get('model', '')} {step['context']} tokens".strip()
    dtype = getattr(torch, shape["dtype"])
    held = kv_bytes(sum(step["seq_lens"]), shape["num_kv_heads"], shape["head_size"], dtype)
    if step["kv_bytes"] != held or step["context"] != sum(step["seq_lens"]):
        yield f"{where}: kv_bytes is {step['kv_bytes']}, should be {held}"
    if floor is None:
        yield f"{where}: the floor is missing"
    elif floor["num_bytes"] < held:
        yield f"{where}: the floor reads {floor['num_bytes']} bytes, K and V hold {held}"
    timed = [result for result in results_of(step) if "seconds" in result]
    if not timed:
        yield f"{where}: nothing was timed"
    for result in [*timed, *([floor] if floor else [])]:
        seconds, (low, high) = result["seconds"], result["spread"]
        name = f"{where}: {result.get('name', 'floor')}"
        median = statistics.median(result["samples"])
        if not (0 < low <= seconds <= high and abs(median - seconds) <= _SAME):
            yield f"{name}: seconds is {seconds}, should be the median of its samples, {median}"
        if floor and result["spread"][1] < floor["spread"][0]:
            yield f"{name}: {seconds} s is faster than the floor, {floor['seconds']} s"
        error = result["max_error"] if result is not floor else 0.0
        if not (isinstance(error, float) and error <= 10 * TOLERANCES[dtype]):
            yield f"{name}: max_error is {error}, which is wrong"


def main(paths: list[str]) -> int:
    """Check JSONs from the command line.

    Returns: the exit status: 1 if there is a problem, 2 if a file can't be read
    """
    status = 0
    if not paths:
        print(f"{COMMAND} takes the JSON of a run, or several", file=sys.stderr)
        return 2
    for path in paths:
        try:
            found = problems(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 2
            continue
        print("\n".join(f"{path}: {problem}" for problem in found) or f"{path}: fine")
        status = max(status, int(bool(found)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
