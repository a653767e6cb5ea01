"""Pictures of ideas, drawn from live tensors: blocks, partitions, padding, waves.

Each function takes what it draws and returns a Picture. Pictures of measurements are in
`curves`, pictures of a pool of blocks in `pool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paged_attention.kernel.partition import ceil_div
from paged_attention.plots.canvas import (
    INK,
    SEQUENCE_COLOURS,
    UNUSED,
    box,
    finish,
    legend_above,
    listed,
    new_panels,
    sequence_colour,
)
from paged_attention.plots.picture import Picture


def draw_padding(seq_lens: Sequence[int], block_size: int) -> Picture:
    """A batch stored twice: padded to its longest sequence, and below that in blocks.

    Args:    seq_lens: tokens of each sequence
             block_size: tokens of a block
    """
    longest = max(seq_lens)
    figure, panels = new_panels(8.0, *[0.26 * len(seq_lens) + 0.55] * 2)
    storage = {
        "one row per sequence, padded to the longest": [longest] * len(seq_lens),
        f"blocks of {block_size} tokens": [ceil_div(n, block_size) * block_size for n in seq_lens],
    }
    for ax, (title, room) in zip(panels, storage.items()):
        for seq, (seq_len, slots) in enumerate(zip(seq_lens, room)):
            ax.text(-0.01 * longest, 0.4 - seq, str(seq_len), fontsize=8, ha="right", va="center")
            box(ax, 0, -seq, slots, 0.8, "#FFFFFF", edgecolor=INK, hatch="/////", linewidth=0.5)
            box(ax, 0, -seq, seq_len, 0.8, sequence_colour(seq))
            for edge in range(block_size, slots, block_size) if ax is panels[1] else ():
                ax.plot([edge, edge], [-seq, 0.8 - seq], color="white", linewidth=0.6)
        used, held = sum(seq_lens), sum(room)
        unused = f"{1 - used / held:.0%} unused (hatched)"
        finish(ax, f"{title}: {held} slots hold {used} tokens, {unused}")
        ax.set_xlim(-0.06 * longest, 1.07 * longest)
    alt = (
        f"Sequences of {listed(seq_lens)} tokens stored twice: each padded to the longest, and in "
        f"blocks of {block_size} tokens, where little stays unused."
    )
    return Picture(figure, alt)


def draw_addresses(offsets_by_layout: Mapping[str, Sequence[int]], num_slots: int) -> Picture:
    """Which elements of a block one token's key occupies: a strip for each layout.

    Args:    offsets_by_layout: {layout: offsets of the token's elements inside the block}
             num_slots: elements that a block holds
    """
    figure, panels = new_panels(8.0, *[0.75] * len(offsets_by_layout))
    for ax, (name, offsets) in zip(panels, offsets_by_layout.items()):
        box(ax, 0, 0, num_slots, 1, UNUSED)
        for offset in offsets:
            box(ax, offset, 0, 1, 1, SEQUENCE_COLOURS[0], edgecolor="none")
        for edge in (0, num_slots // 4, num_slots // 2, 3 * num_slots // 4, num_slots):
            ax.text(edge, -0.1, str(edge), fontsize=8, ha="center", va="top", color=INK)
        finish(ax, f"{name}: the dark ones of a block's {num_slots} elements")
    places = (f"{name}: {listed(sorted(o)[:8])} ..." for name, o in offsets_by_layout.items())
    alt = "The elements of a block that hold one key. " + "; ".join(places)
    return Picture(figure, alt)


def draw_partitions(seq_lens: Sequence[int], partition_size: int) -> Picture:
    """A ragged batch cut into partitions: a bar for each sequence, a box for each partition.

    Args:    seq_lens: tokens of each sequence
             partition_size: tokens of a partition
    """
    figure, [ax] = new_panels(8.0, 0.42 * len(seq_lens) + 0.4)
    for seq, seq_len in enumerate(seq_lens):
        for start in range(0, seq_len, partition_size):
            width = min(partition_size, seq_len - start)
            text = str(width) if width > 0.04 * max(seq_lens) else ""
            box(ax, start, -seq, width, 0.8, sequence_colour(seq), text=text)
        parts = ceil_div(seq_len, partition_size)
        words = f"  {seq_len} tokens, {parts} partition{'s' * (parts != 1)}"
        ax.text(seq_len, 0.4 - seq, words, fontsize=8, color=INK, va="center")
    finish(ax)
    ax.set_xlim(0, 1.3 * max(seq_lens))
    alt = f"Sequences of {listed(seq_lens)} tokens, cut into partitions of {partition_size}."
    return Picture(figure, alt)


def draw_cells(matrices: Mapping[str, torch.Tensor]) -> Picture:
    """Small matrices, a cell for each element; 0, -inf and NaN, which only pad, look different.

    Args:    matrices: {title: (rows, columns)}, drawn one below another
    """
    heights = [0.36 * len(matrix) + 0.45 for matrix in matrices.values()]
    figure, panels = new_panels(8.0, *heights)
    for ax, (title, matrix) in zip(panels, matrices.items()):
        for row, values in enumerate(matrix.tolist()):
            for column, value in enumerate(values):
                text, colour = f"{value:.2g}", SEQUENCE_COLOURS[0]
                if value != value:
                    text, colour = "NaN", SEQUENCE_COLOURS[5]
                elif text in ("0", "-inf"):
                    colour = UNUSED
                hatch = "/////" if text == "-inf" else None
                box(ax, column, -row, 1, 1, colour, text=text, text_size=7, hatch=hatch)
        finish(ax, title)
    sizes = listed(f"{title} ({len(m)} x {len(m[0])})" for title, m in matrices.items())
    alt = f"Small matrices, a box for each number: {sizes}."
    return Picture(figure, alt)


def draw_groups(kv_head_of: Sequence[int]) -> Picture:
    """Which query heads share a KV head: a row of boxes for each KV head.

    Args:    kv_head_of: the KV head of each query head
    """
    num_kv_heads = max(kv_head_of) + 1
    figure, [ax] = new_panels(8.0, 0.42 * num_kv_heads + 0.2)
    for kv_head in range(num_kv_heads):
        colour, bottom = sequence_colour(kv_head), -1.2 * kv_head
        box(ax, 0, bottom, 2.2, 1, colour, text=f"KV head {kv_head}")
        members = [head for head, shared in enumerate(kv_head_of) if shared == kv_head]
        for place, head in enumerate(members):
            left = 2.6 + 1.1 * place
            box(ax, left, bottom, 1, 1, "white", text=f"q{head}", edgecolor=colour, linewidth=2)
    finish(ax)
    alt = f"Query heads beside the KV head that they share: {listed(kv_head_of)}."
    return Picture(figure, alt)


def draw_steps(steps: Mapping[str, Sequence[int]], labels: Sequence[str]) -> Picture:
    """Generations as bars, each step in the colour of its kind.

    Args:    steps: {title: the kind of each step in order, an index into `labels`}
             labels: names of the kinds
    """
    figure, [ax] = new_panels(8.0, 0.42 * len(steps) + 1.0)
    for row, (title, kinds) in enumerate(steps.items()):
        for kind in range(len(labels)):
            spans = [(step, 1) for step, k in enumerate(kinds) if k == kind]
            ax.broken_barh(spans, (-row, 0.8), color=SEQUENCE_COLOURS[kind], linewidth=0)
        ax.text(-0.01 * len(kinds), 0.4 - row, title, fontsize=8, ha="right", va="center")
    for kind, label in enumerate(labels):
        ax.broken_barh([], (0, 0), color=SEQUENCE_COLOURS[kind], label=label)
    legend_above(ax, len(labels))
    ax.set_xlabel("step of the generation")
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.autoscale_view()
    ax.set_xlim(left=0)
    totals = (
        f"{title}: " + listed(f"{label} {list(kinds).count(i)}" for i, label in enumerate(labels))
        for title, kinds in steps.items()
    )
    alt = "Steps of a generation by kind. " + "; ".join(totals) + "."
    return Picture(figure, alt)


def draw_waves(owners: Sequence[int], slots: int, labels: Sequence[str]) -> Picture:
    """Work items on a device that runs `slots` of them at once: a column for each wave.

    Args:    owners: for each item in the order of launch, whose it is, an index into `labels`
             slots: items that run at once
             labels: names of the owners
    """
    num_waves = ceil_div(len(owners), slots)
    figure, [ax] = new_panels(9.0, 0.07 * slots + 1.0)
    for owner, label in enumerate(labels):
        ax.scatter([], [], marker="s", color=sequence_colour(owner), label=label)
    for item in range(num_waves * slots):
        wave, slot = divmod(item, slots)
        colour = sequence_colour(owners[item]) if item < len(owners) else UNUSED
        box(ax, wave, -slot, 1, 1, colour, linewidth=0.3)
    legend_above(ax, len(labels))
    ax.autoscale_view()
    ax.set(xlabel="wave", ylabel=f"{slots} slots", yticks=[])
    alt = f"{len(owners)} work items of {listed(labels)} in {num_waves} waves of {slots} slots."
    return Picture(figure, alt)


def draw_path(steps: Sequence[str], here: str) -> Picture:
    """The series as a path, numbered from 00: earlier steps are filled, the current one is framed.

    Args:    steps: names of all steps
             here: the current one
    """
    figure, [ax] = new_panels(9.0, 0.9)
    for i, step in enumerate(steps):
        done, current = i < steps.index(here), step == here
        box(
            ax, 1.1 * i, 0, 1, 1, "#666666" if done else "white" if current else UNUSED,
            text=f"{i:02d}\n" + step.replace("_", "\n"), text_size=7.5,
            bold=current, edgecolor=INK if current else "none", linewidth=2.5,
        )  # fmt: skip
    finish(ax)
    number, name = steps.index(here), here.replace("_", " ")
    alt = f"The series' notebooks in their order; this is number {number}, {name}."
    return Picture(figure, alt)
