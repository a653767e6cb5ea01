"""`python -m paged_attention`: the ladder on this machine, as a table, a picture and its JSON.

    python -m paged_attention --device cuda --context 1024,32768 --dtype fp16 --out figures/mine

Every stage is checked against a float64 reference, then timed in turns with the others. The exit
status is 0, 1 if a stage was wrong or failed, 2 for a bad option, 130 after Ctrl-C (what was
measured until then is kept).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from . import report
from .fits import USABLE, longest_context, needed_bytes
from .ladder import RUNGS, ContextRun, Settings, describe
from .layouts import lanes_per_piece
from .machine import available_bytes, device_slug
from .progress import progress_of

DTYPES = {
    "fp32": torch.float32,
    "float": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
SHORT, LONGEST = 1024, 100_000
FILES = "ladder.json", "ladder.png"


def main(argv: list[str] | None = None) -> int:
    """Parse, plan, measure, write. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    settings = _settings(parser, options)
    out = (
        Path(options.out)
        if options.out is not None
        else Path("figures") / device_slug(settings.device)
    )
    reason = report.refusal(out, FILES)
    if reason:
        parser.error(f"--out {out}: {reason}")
    contexts = _contexts(parser, options, settings)

    data = describe(settings)
    print(f"{report.hardware(data)}\n{report.workload(data)}", flush=True)
    failed = False
    run = None
    try:
        for context in contexts:
            with progress_of(len(settings.stages)) as progress:
                run = ContextRun(settings, context)
                run.run(progress)
            data["contexts"].append(run.entry())
            failed = failed or bool(run.failures)
            print(f"\n{report.table(run.entry())}", flush=True)
            run = None
    except KeyboardInterrupt:
        data["interrupted"] = True
        if run is not None and run.entry()["stages"]:
            data["contexts"].append(run.entry())
            print(f"\n{report.table(run.entry())}", flush=True)
        if not data["contexts"]:
            print("Interrupted before anything was measured.", file=sys.stderr)
            return 130

    try:
        report.write_json(out / FILES[0], data)
        print(f"\n{out / FILES[0]}")
        _draw(data, out / FILES[1])
    except OSError as error:
        print(f"python -m paged_attention: --out {out}: {error}", file=sys.stderr)
        return 1
    if data["interrupted"]:
        print("Interrupted: the table and the JSON hold what was measured.", file=sys.stderr)
        return 130
    return 1 if failed else 0


def _draw(data: dict, path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(
            f"For {path.name}: pip install -e .[notebooks], "
            f"then python -m paged_attention.plots {path.parent}"
        )
        return
    from .plots import png

    report.write_bytes(path, png(data))
    print(path)


# -- options ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, without the usage: it names the option and its value."""
        print(f"python -m paged_attention: {message}", file=sys.stderr)
        sys.exit(2)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m paged_attention",
        description="Measure every stage of the series, and the final kernel, on this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help=f"cpu, cuda, cuda:1, ... (default here: {default})")
    add(
        "--context",
        type=_list_of(_positive),
        metavar="N[,N]",
        help=f"tokens (default: {SHORT} and the longest up to {LONGEST} that fits the memory)",
    )
    add("--heads", type=_size, default=24, metavar="N", help="query heads (default: 24)")
    add("--kv-heads", type=_size, default=4, metavar="N", help="KV heads (default: 4)")
    add("--head-size", type=_size, default=256, metavar="N", help="default: 256")
    add("--block-size", type=_size, default=16, metavar="N", help="tokens (default: 16)")
    add(
        "--dtype",
        type=_dtype,
        default=torch.float32,
        metavar="TYPE",
        help="fp32, fp16, bf16, or torch's names (default: fp32)",
    )
    add("--partition-size", type=_size, default=512, metavar="N", help="default: 512 tokens")
    add(
        "--stages",
        type=_list_of(_stage),
        default=list(RUNGS),
        metavar="A[,B]",
        help=f"any of {', '.join(RUNGS)} (default: all)",
    )
    add("--out", metavar="DIR", help="where the files go (default: figures/<device>)")
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _size(text: str) -> int:
    value = _positive(text)
    if value >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not below {2**31}")
    return value


def _dtype(text: str) -> torch.dtype:
    try:
        return DTYPES[text.removeprefix("torch.")]
    except KeyError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of fp32, fp16, bf16 (or float32, float16, bfloat16)"
        ) from None


def _stage(text: str) -> str:
    if text not in RUNGS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(RUNGS)}")
    return text


def _list_of(convert):
    return lambda text: [convert(part.strip()) for part in text.split(",")]


def _settings(parser: _Parser, options) -> Settings:
    """The options that depend on each other or on this machine."""
    device = _device(parser, options.device)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    x = lanes_per_piece(options.dtype)
    if options.head_size % x:
        parser.error(
            f"--head-size {options.head_size} is not a multiple of {x}, which the vllm layout "
            f"needs for {options.dtype}"
        )
    return Settings(
        device=device,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_size=options.head_size,
        block_size=options.block_size,
        dtype=options.dtype,
        partition_size=options.partition_size,
        stages=tuple(name for name in RUNGS if name in options.stages),
    )


def _device(parser: _Parser, text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        parser.error(f"--device {text!r} is neither cpu nor cuda: nothing else can be timed")
    if device.type == "cpu":
        return "cpu"
    devices = torch.cuda.device_count()
    if (device.index or 0) >= devices:
        seen = f"only {devices} CUDA device(s)" if devices else "no CUDA device"
        parser.error(f"--device {text!r}: PyTorch sees {seen} here")
    return str(device)


def _contexts(parser: _Parser, options, settings: Settings) -> list[int]:
    """What was asked for if it fits, or 1,024 and the longest that does; says which and why."""
    free = available_bytes(settings.device)
    usable = int(USABLE * free)
    memory = f"{report.human_bytes(usable)} usable ({USABLE:.0%} of what is free)"
    if options.context:
        for context in options.context:
            least = 2 * settings.kv_bytes(context)
            if least > usable:
                parser.error(
                    f"--context {context} needs more than {report.human_bytes(least)} "
                    f"for K and V and the floor's copy; {memory}"
                )
            needed, largest = needed_bytes(settings, context)
            if needed > usable:
                parser.error(
                    f"--context {context} needs {report.human_bytes(needed)}, most of it for "
                    f"{largest}; {memory}"
                )
        return list(dict.fromkeys(options.context))

    print(f"Counting what {LONGEST:,} tokens need", file=sys.stderr, flush=True)
    longest = longest_context(settings, usable, LONGEST)
    short = min(SHORT, longest) if longest >= SHORT else longest_context(settings, usable, SHORT)
    if not short:
        needed, largest = needed_bytes(settings, SHORT)
        parser.error(
            f"--context {SHORT} needs {report.human_bytes(needed)}, most of it for {largest}; "
            f"{memory}: pass a shorter one"
        )
    contexts = sorted({short, longest} - {0})
    needed, largest = needed_bytes(settings, contexts[-1])
    line = (
        f"Contexts: {' and '.join(f'{c:,}' for c in contexts)} tokens; the longer needs "
        f"{report.human_bytes(needed)}, most of it for {largest}; {memory}"
    )
    if longest < LONGEST:
        needed, _ = needed_bytes(settings, LONGEST)
        line += f"; {LONGEST:,} would need {report.human_bytes(needed)}"
    print(line + ".", flush=True)
    return contexts


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `| head`: what was to be read has been read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
