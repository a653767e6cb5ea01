"""The command line's options: what they are, and what about them can be wrong."""

from __future__ import annotations

import argparse
import sys

import torch

from paged_attention.bench.peers.ours_and_sdpa import PEERS
from paged_attention.bench.settings import RUNGS, Settings
from paged_attention.kernel.layouts import lanes_per_piece

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
LENGTHS = 1024, 8192, 32_768, 100_000  # contexts where none is asked for
SHORT, LONGEST = LENGTHS[0], LENGTHS[-1]
OUT = "figures/local"  # a user's own; git ignores it


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, without the usage: it names the option and its value."""
        print(f"python -m paged_attention: {message}", file=sys.stderr)
        sys.exit(2)


def parser_of_options() -> Parser:
    parser = Parser(
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
        help=f"tokens (default: {', '.join(map(str, LENGTHS))}, or up to the longest that fits "
        "the memory)",
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
    add(
        "--partition-size",
        type=_size,
        default=512,
        metavar="N",
        help="tokens, in the stages (default: 512); the kernel chooses its own",
    )
    add(
        "--stages",
        type=_list_of(_stage),
        default=list(RUNGS),
        metavar="A[,B]",
        help=f"any of {', '.join(RUNGS)} (default: all)",
    )
    add(
        "--peers",
        action="store_true",
        help=f"also what others do with the same data, and with a ragged batch: "
        f"{', '.join(PEERS)}",
    )
    add("--out", metavar="DIR", default=OUT, help=f"where the files go (default: {OUT})")
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


def settings_of(parser: Parser, options) -> Settings:
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
        peers=tuple(PEERS) if options.peers else (),
    )


def _device(parser: Parser, text: str) -> str:
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
