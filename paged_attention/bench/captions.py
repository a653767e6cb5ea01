"""What a run says of its machine, its workload and its troubles, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def hardware(run: dict[str, Any]) -> str:
    """One line: the device, its threads, the versions."""
    device, versions = run["device"], run["versions"]
    parts = [device["name"]]
    if device["type"] == "cpu":
        capability = f", {device['cpu_capability']}" if device["cpu_capability"] else ""
        parts[0] += f" ({device['threads']} threads{capability})"
    elif versions.get("cuda"):
        parts.append(f"CUDA {versions['cuda']}")
    return ", ".join([*parts, f"torch {versions['torch']}"])


def workload(run: dict[str, Any]) -> str:
    """One line: the sizes of what was measured."""
    shape = run["shape"]
    partitions = f"{shape['partition_size']:,}"
    kernels = shape.get("kernel_partition_size", shape["partition_size"])  # older runs have none
    if kernels != shape["partition_size"]:
        partitions += f", of {kernels:,} in paged_attention"
    return (
        f"1 sequence, {shape['num_heads']} query heads, {shape['num_kv_heads']} KV heads, "
        f"head size {shape['head_size']}, {shape['dtype']}, block size {shape['block_size']}, "
        f"partitions of {partitions}"
    )


def title(seq_lens: Sequence[int]) -> str:
    """A batch in a few words.

    Example:
        >>> title([1024]), title([7, 50, 130])
        ('1,024 tokens', '3 sequences of 7 to 130 tokens, 187 in all')
    """
    if len(seq_lens) == 1:
        return f"{seq_lens[0]:,} tokens"
    return (
        f"{len(seq_lens)} sequences of {min(seq_lens):,} to {max(seq_lens):,} tokens, "
        f"{sum(seq_lens):,} in all"
    )


def rate(floor: dict[str, Any]) -> str:
    """How fast the floor reads."""
    return f"{floor['num_bytes'] / floor['seconds'] / 1e9:.1f} GB/s"


def busy(step: dict[str, Any]) -> list[str]:
    """A warning if other processes were busy while a step was measured, or no line."""
    others = step["other_cores"]
    if others is None or others < 0.1:
        return []
    return [f"Other processes used {others:.1f} cores meanwhile: these times are too long."]


def reason_of(error: Exception, longest: int = 100) -> str:
    """An error's kind and its first line, for the JSON, which goes to others.

    Of a path it keeps the last part only.

    Example:
        >>> reason_of(OSError("can't open /some/where/lib.so: no such file"))
        "OSError: can't open lib.so: no such file"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    text = without_folders(text)
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."


def without_folders(text: str) -> str:
    """The same words, but of each path only its last part."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)*([^\s/'\"]*)", r"\1", text)
