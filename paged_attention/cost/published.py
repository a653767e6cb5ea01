"""What others published of decode attention's speed, beside what the model says of it.

    python -m paged_attention.cost.published figures/published.json     prints the tables

A row of that JSON is a measurement. What ran was a program of PyTorch operations ("eager"), and
the model prices the same program, or a compiled kernel. Beside that one stands what the model
says of ours. docs/contributing.md has the fields.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paged_attention.cost.predict import KERNEL, cost_of, predict
from paged_attention.cost.shape import Shape
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure, gpu_profile

Row = dict[str, Any]


def table(published: dict[str, Any], kind: str) -> str:
    """The rows of one kind as a table in Markdown.

    Args:    published: what published.json holds
             kind: "eager" or "compiled"
    """
    program = "the model" if kind == "eager" else "the model, of our kernel"
    lines = [
        "| device | what was timed | sequences x tokens | heads | floor, us | measured, us "
        f"| {program}, us | measured / model |",
        "|---|---|--:|---|--:|--:|--:|--:|",
    ]
    for row in published["rows"]:
        if row["kind"] != kind:
            continue
        profile = profile_for(row, published["devices"])
        band, ratio, us = predicted(row, profile), "", ""
        if band is not None:
            us = f"{1e6 * band.low:,.0f} to {1e6 * band.high:,.0f}"
            ratio = f"{row['us'] / (1e6 * middle(band)):.2f}"
        heads = f"{row['num_heads']}/{row['num_kv_heads']}/{row['head_size']}, {row['dtype']}"
        lines.append(
            f"| {row['device']} | [{row['what']}]({row['source']}) "
            f"| {row['num_seqs']} x {row['tokens']:,} | {heads} "
            f"| {1e6 * floor_of(row, profile):,.0f} | {row['us']:,.0f} | {us} | {ratio} |"
        )
    return "\n".join(lines)


def profile_for(row: Row, devices: dict[str, Any]) -> DeviceProfile:
    """The profile of a row's device, without its host where the row's clock was the device's."""
    profile = PROFILES.get(row["device"])
    if profile is None:
        device = devices[row["device"]]
        bandwidth = Figure(device["bandwidth"], device["bandwidth"], "B/s", device["source"])
        profile = gpu_profile(row["device"], bandwidth)
    if row["clock"] == "device":
        return replace(profile, op_cost=Figure(0.0, 0.0, "s", "not timed"), host_read=None)
    return profile


def floor_of(row: Row, profile: DeviceProfile) -> float:
    """Seconds in which the device can read K and V once, at its best bandwidth."""
    assert profile.bandwidth is not None
    itemsize = getattr(torch, row["dtype"]).itemsize
    elements = 2 * row["num_seqs"] * row["tokens"] * row["num_kv_heads"] * row["head_size"]
    return elements * itemsize / profile.bandwidth.high


def predicted(row: Row, profile: DeviceProfile) -> Figure | None:
    """Seconds: of the row's program, or of our kernel on an "HND" cache where it has none.

    Returns: None for a dtype that the model's shapes don't have
    """
    dtype = getattr(torch, row["dtype"])
    if dtype.itemsize == 1:
        return None
    names = "num_heads", "num_kv_heads", "head_size"
    shape = Shape(
        [row["tokens"]] * row["num_seqs"],
        **{name: row[name] for name in names},
        block_size=row["block_size"] or 16,
        dtype=dtype,
        layout="HND" if row["kind"] == "compiled" else "vllm",
    )
    if row["kind"] == "compiled":
        return predict(KERNEL, shape, profile).seconds
    return cost_of(PROGRAMS[row["program"]](shape), profile).seconds


def middle(band: Figure) -> float:
    """The one number that a band is compared by."""
    return math.sqrt(band.low * band.high)


def dense(shape: Shape) -> Callable[[], object]:
    """Keys and values in order, as many heads as queries have."""
    query, key, value = _dense_inputs(shape)
    return lambda: torch.softmax(query @ key.transpose(2, 3), dim=-1) @ value


def dense_softmax_in_fp32(shape: Shape) -> Callable[[], object]:
    """The same, scaled, with the logits in float32."""
    query, key, value = _dense_inputs(shape)

    def run() -> object:
        logits = (query @ key.transpose(2, 3) * 0.1).float()
        return torch.softmax(logits, dim=-1).to(value.dtype) @ value

    return run


def gather_permute_matmul(shape: Shape) -> Callable[[], object]:
    """One sequence of the "vllm" layout: blocks picked, tokens put in order, widened, multiplied.

    K is put in order twice: tokens first, and then lanes first.
    """
    query, key_cache, value_cache, tables, _ = shape.inputs()
    ids, group = tables[0].to("meta"), shape.num_heads // shape.num_kv_heads
    of_heads = -1, shape.num_kv_heads, shape.head_size

    def picked(cache: torch.Tensor, order: tuple[int, ...], then: tuple[int, ...]) -> torch.Tensor:
        tokens = cache[ids].permute(order).contiguous().view(of_heads)[: shape.seq_lens[0]]
        return tokens.permute(then).contiguous().float().unsqueeze(1)

    def run() -> object:
        lanes_first = picked(key_cache, (0, 3, 1, 2, 4), (1, 2, 0))
        values = picked(value_cache, (0, 3, 1, 2), (1, 0, 2))
        q = query[0].float().view(shape.num_kv_heads, group, 1, shape.head_size)
        weights = torch.softmax(torch.matmul(q * 0.1, lanes_first), dim=-1)
        return torch.matmul(weights, values).to(query.dtype)

    return run


def block_loop(shape: Shape) -> Callable[[], object]:
    """A host read for each block, each sequence put into a padded copy, heads repeated."""
    query, key_cache, _, tables, lens = replace(shape, layout="NHD").inputs()
    longest, group = max(shape.seq_lens), shape.num_heads // shape.num_kv_heads
    lens_there = lens.to("meta")

    def run() -> object:
        lens.max().item()
        padded = [
            key_cache.new_zeros(len(lens), longest, shape.num_kv_heads, shape.head_size)
            for _ in "kv"
        ]
        for seq, table in enumerate(tables):
            tokens = int(lens[seq].item())
            ids = [int(table[i].item()) for i in range(-(-tokens // shape.block_size))]
            for rows in padded:
                rows[seq, :tokens] = torch.cat([key_cache[i] for i in ids])[:tokens]
        k, v = (rows.repeat_interleave(group, dim=2).transpose(1, 2) for rows in padded)
        logits = torch.matmul(query.unsqueeze(2), k.transpose(2, 3)) * 0.1
        seen = torch.arange(longest, device="meta")[None, :] < lens_there[:, None]
        logits = logits.masked_fill(~seen[:, None, None, :], -torch.inf)
        return torch.matmul(torch.softmax(logits, dim=-1), v)

    return run


def _dense_inputs(shape: Shape) -> list[torch.Tensor]:
    sizes = len(shape.seq_lens), shape.num_heads
    return [
        torch.empty(*sizes, tokens, shape.head_size, dtype=shape.dtype, device="meta")
        for tokens in (1, shape.seq_lens[0], shape.seq_lens[0])
    ]


PROGRAMS = {
    p.__name__: p for p in (dense, dense_softmax_in_fp32, gather_permute_matmul, block_loop)
}


if __name__ == "__main__":
    for one_kind in ("eager", "compiled"):
        text = Path(sys.argv[1]).read_text(encoding="utf-8")
        print(table(json.loads(text), one_kind), end="\n\n")
