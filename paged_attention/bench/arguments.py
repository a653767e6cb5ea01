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
    settings = Settings(**options)  # every other option is called like its field
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

    def add(option: str, field: str, value: Callable[[str], Any], unit: str, words: str) -> None:
        default = getattr(Settings, field)
        parser.add_argument(
            option, dest=field, type=value, default=default, metavar=unit, help=words
        )

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=_device, default=default,
        help=f"cpu, cuda, cuda:1, ... (default here: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=_list_of(_positive), metavar="N[,N]",
        help=f"tokens (default: {', '.join(map(str, LENGTHS))}, or up to the longest that fits "
        "the memory)",
    )  # fmt: skip
    add("--heads", "num_heads", _size, "N", "query heads (default: %(default)s)")
    add("--kv-heads", "num_kv_heads", _size, "N", "KV heads (default: %(default)s)")
    add("--head-size", "head_size", _size, "N", "default: %(default)s")
    add("--block-size", "block_size", _size, "N", "tokens (default: %(default)s)")
    add("--dtype", "dtype", _dtype, "TYPE", "fp32, fp16, bf16, or torch's names (default: fp32)")
    of_stages = "tokens, in the stages (default: %(default)s); the kernel chooses its own"
    add("--partition-size", "partition_size", _size, "N", of_stages)
    add("--stages", "stages", _stages, "A[,B]", f"any of {', '.join(LADDER)} (default: all)")
    parser.add_argument(
        "--peers", action="store_const", const=tuple(PEERS), default=(),
        help="also what others do with the same data, and with a ragged batch: "
        f"{', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", default=OUT, help=f"where the files go (default: {OUT})"
    )
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


def _stages(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LADDER:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(LADDER)}")
    return tuple(name for name in LADDER if name in names)


def _list_of(convert: Callable[[str], int]) -> Callable[[str], list[int]]:
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
