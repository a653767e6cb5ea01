"""What a run says of its machine and its workload, in words."""

from __future__ import annotations


def hardware(data: dict) -> str:
    """One line: the device, its threads, the versions."""
    device, versions = data["device"], data["versions"]
    parts = [device["name"]]
    if device["type"] == "cpu":
        capability = f", {device['cpu_capability']}" if device["cpu_capability"] else ""
        parts[0] += f" ({device['threads']} threads{capability})"
    elif versions.get("cuda"):
        parts.append(f"CUDA {versions['cuda']}")
    return ", ".join([*parts, f"torch {versions['torch']}"])


def workload(data: dict) -> str:
    """One line: the shape that was measured."""
    shape = data["shape"]
    kernels = shape.get("kernel_partition_size", shape["partition_size"])  # one in older runs
    parts = f"{shape['partition_size']:,}"
    if kernels != shape["partition_size"]:
        parts += f", of {kernels:,} in paged_attention"
    return (
        f"1 sequence, {shape['num_heads']} query heads, {shape['num_kv_heads']} KV heads, "
        f"head size {shape['head_size']}, {shape['dtype']}, block size {shape['block_size']}, "
        f"partitions of {parts}"
    )


def title(seq_lens) -> str:
    """A batch in a few words: "1,024 tokens"."""
    if len(seq_lens) == 1:
        return f"{seq_lens[0]:,} tokens"
    return (
        f"{len(seq_lens)} sequences of {min(seq_lens):,} to {max(seq_lens):,} tokens, "
        f"{sum(seq_lens):,} in all"
    )


def busy(entry: dict) -> list[str]:
    """What to know of the machine while it measured: nothing, if other processes left it alone."""
    others = entry["other_cores"]
    if others is None or others < 0.1:
        return []
    return [f"Other processes used {others:.1f} cores meanwhile: these times are too long."]
