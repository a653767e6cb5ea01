"""The command line's options: what they are, and what can be wrong about them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from paged_attention.bench.captions import reason_of
from paged_attention.bench.models import MODELS
from paged_attention.bench.peers import PEERS
from paged_attention.bench.settings import LADDER, Settings
from paged_attention.kernel.layouts import lanes_per_piece

COMMAND = "python -m paged_attention"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
OUT = Path("figures/local")  # a user's own; git ignores it


def refuse(message: str) -> NoReturn:
    """End with status 2 and one line, which names the option and its value."""
    print(f"{COMMAND}: {message}", file=sys.stderr)
    sys.exit(2)


class Asked(NamedTuple):
    """What the command line asks for.

    settings: of a ladder
    contexts: tokens, None if none were named
    models:   names of MODELS. If there are any, their shapes are measured, and no ladder
    out:      the folder where the files go
    """

    settings: Settings
    contexts: list[int] | None
    models: list[str]
    out: Path


def parse(argv: list[str] | None = None) -> Asked:
    """The command line.

    Args:    argv: without the command's name; None: the process's own
    """
    parser = _parser()
    options = vars(parser.parse_args(argv))
    contexts, out, models = (options.pop(name) for name in ("context", "out", "models"))
    if models:
        fixed = parser.parse_args([f"--device={options['device']}"])
        changed = [name for name in options if options[name] != getattr(fixed, name)]
        if contexts or changed:
            refuse(f"--models has shapes of its own: leave out {(['context', *changed])[-1]}")
        return Asked(Settings(options["device"]), None, models, out)
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
    return Asked(settings, contexts, [], out)


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
    contexts = "tokens (default: 1024, 8192, 32768 and 100000, as far as they fit the memory)"
    others = f"also what others do with the same data, and with a ragged batch: {', '.join(PEERS)}"
    add("--device", type=_device, help="cpu, cuda, cuda:1, ... (default here: %(default)s)")
    add("--context", type=_list_of(_size), metavar="N[,N]", help=contexts)
    add("--heads", dest="num_heads", help="query heads (default: %(default)s)", **size)
    add("--kv-heads", dest="num_kv_heads", help="KV heads (default: %(default)s)", **size)
    add("--head-size", help="default: %(default)s", **size)
    add("--block-size", help="tokens (default: %(default)s)", **size)
    add("--dtype", type=_name_in(DTYPES), metavar="TYPE", help=f"{', '.join(DTYPES)}")
    of_stages = "tokens, in the stages (default: %(default)s); the kernel chooses its own"
    add("--partition-size", help=of_stages, **size)
    stages = f"any of {', '.join(LADDER)} (default: all)"
    a_stage = _name_in(dict(zip(LADDER, LADDER)))
    add("--stages", type=_list_of(a_stage), metavar="A[,B]", help=stages)
    add("--peers", action="store_const", const=tuple(PEERS), help=others)
    shapes = f"instead of the ladder, steps of real models' shapes: {', '.join(MODELS)}"
    of_models = _list_of(_name_in(dict(zip(MODELS, MODELS))))
    add("--models", nargs="?", type=of_models, const=[*MODELS], metavar="A[,B]", help=shapes)
    out = "where the files go (default: %(default)s)"
    add("--out", metavar="DIR", type=_folder, default=OUT, help=out)
    parser.set_defaults(**vars(Settings(device="cuda" if torch.cuda.is_available() else "cpu")))
    return parser


def _size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value < 2**31:
        rule = f"a whole number of at least 1 and below {2**31}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")
    return value


def _name_in(choices: Mapping[str, Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return choices[text]

    return convert


def _list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [convert(part.strip()) for part in text.split(",")]


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' names no folder")
    return Path(text)


def _device(text: str) -> str:
    try:
        device = torch.empty(0, device=text).device
    except Exception as error:  # which depends on the device
        raise argparse.ArgumentTypeError(f"{text!r}: {reason_of(error)}") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither cpu nor cuda: nothing else can be timed"
        )
    return text if device.type == "cuda" else "cpu"
