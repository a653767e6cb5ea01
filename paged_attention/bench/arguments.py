"""The command line's options: what they are, and what can be wrong about them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from paged_attention.bench.memory import LENGTHS
from paged_attention.bench.peers import PEERS
from paged_attention.bench.settings import LADDER, Settings
from paged_attention.kernel.layouts import lanes_per_piece

COMMAND = "python -m paged_attention"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
OUT = "figures/local"  # a user's own; git ignores it


def refuse(message: str) -> NoReturn:
    """End with status 2 and one line, which names the option and its value."""
    print(f"{COMMAND}: {message}", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str] | None = None) -> tuple[Settings, list[int] | None, Path]:
    """The command line.

    Args:    argv: without the command's name; None: the process's own
    Returns: settings: of the run;  contexts: as asked for, None if they weren't;  the folder
             where the files go
    """
    options = vars(_parser().parse_args(argv))
    contexts, out = options.pop("context"), Path(options.pop("out"))
    options["stages"] = tuple(name for name in LADDER if name in options["stages"])
    settings = Settings(**options)  # the other options are called like its fields
    heads, kv_heads, lanes = settings.num_heads, settings.num_kv_heads, settings.head_size
    if heads % kv_heads:
        refuse(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    if lanes % (x := lanes_per_piece(settings.dtype)):
        refuse(
            f"--head-size {lanes} is not a multiple of {x}, which the vllm layout needs for "
            f"{settings.dtype}"
        )
    return settings, contexts, out


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, without the usage."""
        refuse(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog=COMMAND,
        description="Measure every stage of the series, and the final kernel, on this machine.",
        allow_abbrev=False,
    )

    add = parser.add_argument
    size: dict[str, Any] = {"type": _size, "metavar": "N"}
    lengths = ", ".join(map(str, LENGTHS))
    contexts = f"tokens (default: {lengths}, or up to the longest that fits the memory)"
    others = f"also what others do with the same data, and with a ragged batch: {', '.join(PEERS)}"
    add("--device", type=_device, help="cpu, cuda, cuda:1, ... (default here: %(default)s)")
    add("--context", type=_list_of(_positive), metavar="N[,N]", help=contexts)
    add("--heads", dest="num_heads", help="query heads (default: %(default)s)", **size)
    add("--kv-heads", dest="num_kv_heads", help="KV heads (default: %(default)s)", **size)
    add("--head-size", help="default: %(default)s", **size)
    add("--block-size", help="tokens (default: %(default)s)", **size)
    dtypes = "fp32, fp16, bf16, or torch's names (default: fp32)"
    add("--dtype", type=_dtype, metavar="TYPE", help=dtypes)
    of_stages = "tokens, in the stages (default: %(default)s); the kernel chooses its own"
    add("--partition-size", help=of_stages, **size)
    stages = f"any of {', '.join(LADDER)} (default: all)"
    add("--stages", type=_list_of(_stage), metavar="A[,B]", help=stages)
    add("--peers", action="store_const", const=tuple(PEERS), help=others)
    add("--out", metavar="DIR", default=OUT, help="where the files go (default: %(default)s)")
    parser.set_defaults(**vars(Settings(device="cuda" if torch.cuda.is_available() else "cpu")))
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
    name = text.removeprefix("torch.")
    dtype = getattr(torch, SHORT_NAMES.get(name, name), None)
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of fp32, fp16, bf16 (or float32, float16, bfloat16)"
        )
    return dtype


def _stage(text: str) -> str:
    if text not in LADDER:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LADDER)}")
    return text


def _list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [convert(part.strip()) for part in text.split(",")]


def _device(text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither cpu nor cuda: nothing else can be timed"
        )
    if device.type == "cpu":
        return "cpu"
    devices = torch.cuda.device_count()
    if (device.index or 0) >= devices:
        seen = f"only {devices} CUDA device(s)" if devices else "no CUDA device"
        raise argparse.ArgumentTypeError(f"{text!r}: PyTorch sees {seen} here")
    return str(device)
