"""Ask a device everything at once, to send the answers in: `make device`.

    make device VENV=none PYTHON=python3 OUT=figures/my-card
    make device DEVICE=cpu ARGS="--context 1024"

Four parts, each in a process of its own and with a limit on its time: the tests that are for this
device, a CUDA graph of a step, and the ladder with its peers in float32 and in bfloat16. A part
that fails doesn't keep the others from running. The folder then holds

    summary.txt         what to read
    device.json         the machine, what became of each part, the graph's figures
    ladder.json, bf16/ladder.json    the ladders, with their pictures
    *.log               what each part printed

The exit status is 0 if every part was fine, 1 if one wasn't, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from paged_attention import Workspace, plan_decode, reference_attention
from paged_attention.bench.arguments import parse
from paged_attention.bench.captions import hardware, without_folders, workload
from paged_attention.bench.check import problems
from paged_attention.bench.files import write_bytes, write_json
from paged_attention.bench.memory import too_large
from paged_attention.bench.table import table
from paged_attention.inputs import random_inputs
from paged_attention.measure import measure
from paged_attention.measure.machine import describe
from paged_attention.measure.units import human_seconds

ROOT = Path(__file__).resolve().parents[2]
CONTEXTS = {"cuda": "1024,100000", "cpu": "1024,8192"}
TESTS = {"cuda": ["-m", "cuda", "tests"], "cpu": ["-m", "quick", "tests/kernel"]}
LADDERS = {"fp32": "ladder.json", "bf16": "bf16/ladder.json"}
LAST_WORDS = 30  # seconds for a part that was interrupted to write what it has


class Part(NamedTuple):
    name: str
    command: list[str]  # Python's arguments
    seconds: int  # at most. They add up to less than ten minutes


def main(argv=None):
    options = parsed(argv)
    if options.graph:
        print(json.dumps(graph_of_a_step(options.device)))
        return 0
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    device = {"kind": "device", "schema": 1, **describe(options.device), "interrupted": False}
    done = []
    parts = parts_of(options)
    for number, part in enumerate(parts, 1):
        say(f"[{number}/{len(parts)}] {part.name}, at most {part.seconds} s")
        try:
            done.append(result_of(part, out / f"{part.name.replace(' ', '_')}.log"))
        except KeyboardInterrupt:
            device["interrupted"] = True
            break
        say(f"[{number}/{len(parts)}] {part.name}: {done[-1]['status']}")
    ladders = judged(out, done, device["date"])
    write_json(out / "device.json", {**device, "parts": done, "ladders": list(ladders)})
    text = summary(device, done, ladders)
    write_bytes(out / "summary.txt", text.encode())
    print(text)
    failed = len(done) < len(parts) or any(part["status"] != "fine" for part in done)
    return 130 if device["interrupted"] else int(failed)


def parsed(argv):
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="make device", allow_abbrev=False)
    parser.add_argument("--device", default=here)
    parser.add_argument("--out", type=Path, default=Path("figures/local/device"))
    parser.add_argument("--tests", nargs="+", help="pytest's arguments, instead of the usual ones")
    parser.add_argument("--graph", action="store_true", help="this part alone, in this process")
    parser.add_argument("ladder", nargs="*", help="options of python -m paged_attention, after --")
    options = parser.parse_args(argv)
    settings, contexts, *_ = parse(["--device", options.device, "--peers", *options.ladder])
    options.device = settings.device
    kind = torch.device(options.device).type
    if not contexts:
        asked = map(int, CONTEXTS[kind].split(","))
        contexts = [n for n in asked if too_large(settings, [n]) is None]
        options.ladder += ["--context", ",".join(map(str, contexts))]
    options.tests = options.tests or TESTS[kind]
    return options


def parts_of(options):
    tests = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
    tests += ["--continue-on-collection-errors", *options.tests]
    graph = [str(Path(__file__).resolve()), "--graph", "--device", options.device]
    ladder = ["-m", "paged_attention", "--device", options.device, "--peers", *options.ladder]
    return [
        Part("tests", tests, 150),
        Part("graph", graph, 40),
        *(
            Part(
                f"ladder {dtype}",
                [*ladder, "--dtype", dtype, "--out", str((options.out / file).resolve().parent)],
                190,
            )
            for dtype, file in LADDERS.items()
        ),
    ]


def result_of(part, log):
    """Run a part, show what it prints, and say what became of it.

    A part that takes too long is interrupted as by Ctrl-C, so that the ladder keeps what it has.
    """
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, *part.command]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    # A shell's background jobs ignore Ctrl-C. A part heeds it all the same.
    pipe["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    start = time.monotonic()
    lines = []
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(command, env=env, **pipe) as p:
        limits = [
            threading.Timer(part.seconds, p.send_signal, [signal.SIGINT]),
            threading.Timer(part.seconds + LAST_WORDS, p.kill),
        ]
        for limit in limits:
            limit.start()
        try:
            for line in p.stdout:
                file.write(line)
                file.flush()
                say(line.rstrip())
                lines.append(line.strip())
            p.wait()
        except KeyboardInterrupt:
            p.wait(LAST_WORDS)  # it had the same Ctrl-C
            raise
        finally:
            for limit in limits:
                limit.cancel()
    seconds = time.monotonic() - start
    status = "fine" if p.returncode == 0 else f"FAILED, exit status {p.returncode}"
    if seconds > part.seconds:
        status = f"took longer than {part.seconds} s"
    last = next((line for line in reversed(lines) if line), "")
    said = without_folders(last)  # what is sent in names no path of the machine
    result = {"name": part.name, "status": status, "seconds": round(seconds, 1), "said": said}
    if part.name == "graph" and status == "fine":
        result |= {"said": "", "figures": json.loads(last)}
    return result


def judged(out, done, since):
    """{file: run} of the ladders that were measured since. One with problems isn't fine."""
    ladders = {}
    for dtype, name in LADDERS.items():
        part = next((part for part in done if part["name"] == f"ladder {dtype}"), None)
        if part and (out / name).exists():
            run = json.loads((out / name).read_text(encoding="utf-8"))
            if run["date"] < since:  # an older run's
                continue
            ladders[name] = run
            part["problems"] = problems(run)
            if part["problems"] and part["status"] == "fine":
                part["status"] = "FAILED, its JSON can't be believed"
    return ladders


def summary(device, done, ladders):
    lines = [hardware(device), f"{device['date']}, commit {device['commit']}", ""]
    for part in done:
        lines.append(f"{part['name']}: {part['status']}, {part['seconds']:.0f} s  {part['said']}")
        lines += [f"    {problem}" for problem in part.get("problems", [])]
        if "figures" in part:
            lines.append("    " + in_words(part["figures"]))
    if device["interrupted"]:
        lines.append("Interrupted: the parts above are what was done.")
    for name, run in ladders.items():
        steps = [*run["contexts"], *run["batches"]]
        lines += ["", f"{name}: {workload(run)}", *(f"\n{table(step)}" for step in steps)]
    return "\n".join(lines) + "\n"


# -- the graph


def graph_of_a_step(device, seq_lens=(8000, 333), capacity=8192):
    """A capacity plan, captured once and replayed with other lengths; on a CPU it is run again."""
    x = random_inputs(seq_lens, layout="HND", device=device)
    num_seqs, num_heads, head_size = x.query.shape
    _, num_kv_heads, block_size, _ = x.key_cache.shape
    plan = plan_decode(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size,
        block_size=block_size, layout="HND", device=device, num_seqs=num_seqs,
        max_seq_len=capacity,
    )  # fmt: skip
    out, workspace = torch.empty_like(x.query), Workspace()

    def step():
        plan.run(*x, out=out, workspace=workspace)

    again, captured = step, torch.device(device).type == "cuda"
    step()
    if captured:
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
        again = graph.replay
    error = 0.0
    for lens in (seq_lens, (1, 17), (4321, 0)):
        x.seq_lens.copy_(torch.tensor(lens, dtype=x.seq_lens.dtype))
        out.fill_(torch.nan)
        again()
        expected, _ = reference_attention(*x, layout="HND")
        error = max(error, (out.double() - expected).abs().max().nan_to_num(torch.inf).item())
    x.seq_lens.copy_(torch.tensor(seq_lens, dtype=x.seq_lens.dtype))
    if not error < 1e-5:
        raise AssertionError(f"a replay is off by {error}")
    times = {
        name: measure(fn, device=device).seconds for name, fn in (("run", step), ("again", again))
    }
    return {"captured": captured, "max_error": error, "seq_lens": list(seq_lens), **times}


def in_words(graph):
    how = "replayed from a graph" if graph["captured"] else "run again, as a CPU has no graphs,"
    run, again = human_seconds(graph["run"]), human_seconds(graph["again"])
    error = f"off by {graph['max_error']:.1g}"
    return f"a step of {graph['seq_lens']} tokens: run {run}, {how} {again}, {error}"


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
