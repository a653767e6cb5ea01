"""Pictures of ideas, drawn from live tensors: blocks, tables, padding, partitions.

(Pictures of measurements are in `plots`.) Each function takes what it draws and returns a
matplotlib Figure; matplotlib is imported when a picture is asked for.
"""

from paged_attention.kernel.partition import ceil_div
from paged_attention.plots.canvas import (
    INK,
    SEQUENCE_COLOURS,
    UNUSED,
    box,
    finish,
    new_figure,
    text_colour,
)


def draw_padding(seq_lens, block_size):
    """A batch stored padded to its longest sequence, above the same batch stored in blocks."""
    longest = max(seq_lens)
    fig, axes = new_figure(8.0, 0.52 * len(seq_lens) + 1.1, rows=2)
    for ax, title, room in (
        (axes[0], "one row per sequence, padded to the longest", [longest] * len(seq_lens)),
        (
            axes[1],
            f"blocks of {block_size} tokens",
            [ceil_div(n, block_size) * block_size for n in seq_lens],
        ),
    ):
        for seq, (seq_len, slots) in enumerate(zip(seq_lens, room)):
            ax.text(-0.01 * longest, 0.4 - seq, seq_len, fontsize=8, ha="right", va="center")
            box(ax, 0, -seq, slots, 0.8, "#FFFFFF", edge=INK, hatch="/////", line=0.5)
            box(ax, 0, -seq, seq_len, 0.8, SEQUENCE_COLOURS[seq % 6])
            if "blocks" in title:
                for edge in range(block_size, slots, block_size):
                    ax.plot([edge, edge], [-seq, 0.8 - seq], color="white", linewidth=0.6)
        used, held = sum(seq_lens), sum(room)
        ax.set_title(
            f"{title}: {held} slots hold {used} tokens, {1 - used / held:.0%} unused (hatched)",
            fontsize=9, loc="left", color=INK,
        )  # fmt: skip
        finish(ax)
        ax.set_xlim(-0.06 * longest, 1.07 * longest)
    return fig


def draw_addresses(layouts_and_offsets, num_slots):
    """Which elements of a block one token's key occupies, one strip per layout.

    Args:    layouts_and_offsets: {name: list of int, element offsets inside the block}
             num_slots: elements a block holds
    """
    fig, axes = new_figure(8.0, 0.75 * len(layouts_and_offsets), rows=len(layouts_and_offsets))
    for ax, (name, offsets) in zip(axes, layouts_and_offsets.items()):
        box(ax, 0, 0, num_slots, 1, UNUSED)
        for offset in offsets:
            box(ax, offset, 0, 1, 1, SEQUENCE_COLOURS[0], edge="none")
        title = f"{name}: the dark ones of a block's {num_slots} elements"
        ax.set_title(title, fontsize=9, loc="left", color=INK)
        finish(ax)
    return fig


def draw_partitions(seq_lens, partition_size):
    """A ragged batch cut into partitions: one bar per sequence, one shade per partition."""
    fig, ax = new_figure(8.0, 0.42 * len(seq_lens) + 0.4)
    for seq, seq_len in enumerate(seq_lens):
        for start in range(0, seq_len, partition_size):
            width = min(partition_size, seq_len - start)
            colour = SEQUENCE_COLOURS[seq % 6]
            box(ax, start, -seq, width, 0.8, colour)
            if width > 0.04 * max(seq_lens):
                ax.text(
                    start + width / 2, 0.4 - seq, f"{width}",
                    fontsize=8, color=text_colour(colour), ha="center", va="center",
                )  # fmt: skip
        parts = ceil_div(seq_len, partition_size)
        ax.text(
            seq_len, 0.4 - seq, f"  {seq_len} tokens, {parts} partition{'s' * (parts != 1)}",
            fontsize=8, color=INK, va="center",
        )  # fmt: skip
    finish(ax)
    ax.set_xlim(0, 1.3 * max(seq_lens))
    return fig


def draw_cells(matrices):
    """Small matrices, one cell per element: what is live, and what 0, -inf or NaN pads it.

    Args:    matrices: {title: (rows, columns) tensor}, drawn one below the other
    """
    heights = [0.36 * len(matrix) + 0.45 for matrix in matrices.values()]
    fig, axes = new_figure(8.0, sum(heights), rows=len(matrices), height_ratios=heights)
    for ax, (title, matrix) in zip([axes] if len(matrices) == 1 else axes, matrices.items()):
        for row, values in enumerate(matrix.tolist()):
            for column, value in enumerate(values):
                padding = {"0.0": "0", "-inf": "-inf", "nan": "NaN"}.get(str(value))
                colour = SEQUENCE_COLOURS[5] if padding == "NaN" else UNUSED
                colour = colour if padding else SEQUENCE_COLOURS[0]
                hatch = "/////" if padding == "-inf" else None
                box(ax, column, -row, 1, 1, colour, hatch=hatch)
                text = f"{value:.2g}" if padding is None else padding
                ax.text(
                    column + 0.5, 0.5 - row, text,
                    fontsize=7, color=text_colour(colour), ha="center", va="center",
                )  # fmt: skip
        ax.set_title(title, fontsize=9, loc="left", color=INK)
        finish(ax)
    return fig


def draw_groups(kv_head_of):
    """Which query heads share a KV head: a row of boxes for each KV head.

    Args:    kv_head_of: list of int, the KV head of each query head
    """
    num_kv_heads = max(kv_head_of) + 1
    fig, ax = new_figure(8.0, 0.42 * num_kv_heads + 0.2)
    for kv_head in range(num_kv_heads):
        colour = SEQUENCE_COLOURS[kv_head % 6]
        box(ax, 0, -1.2 * kv_head, 2.2, 1, colour)
        ax.text(
            1.1, 0.5 - 1.2 * kv_head, f"KV head {kv_head}",
            fontsize=8, color=text_colour(colour), ha="center", va="center",
        )  # fmt: skip
        members = [head for head, k in enumerate(kv_head_of) if k == kv_head]
        for place, head in enumerate(members):
            box(ax, 2.6 + 1.1 * place, -1.2 * kv_head, 1, 1, "white", edge=colour, line=2)
            ax.text(
                3.1 + 1.1 * place, 0.5 - 1.2 * kv_head, f"q{head}",
                fontsize=8, color=INK, ha="center", va="center",
            )  # fmt: skip
    finish(ax)
    return fig


def draw_steps(steps, labels):
    """Generations as bars, one shade per kind of step.

    Args:    steps: {title: list of int}, the kind of each step in order, an index into labels
             labels: what the kinds are
    """
    fig, ax = new_figure(8.0, 0.42 * len(steps) + 1.0)
    for row, (title, kinds) in enumerate(steps.items()):
        for kind in range(len(labels)):
            spans = [(i, 1) for i, k in enumerate(kinds) if k == kind]
            ax.broken_barh(spans, (-row, 0.8), color=SEQUENCE_COLOURS[kind], linewidth=0)
        ax.text(-0.01 * len(kinds), 0.4 - row, title, fontsize=8, ha="right", va="center")
    for kind, label in enumerate(labels):
        ax.broken_barh([], (0, 0), color=SEQUENCE_COLOURS[kind], label=label)
    ax.legend(
        ncols=len(labels), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1)
    )
    ax.set_xlabel("step of the generation")
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.autoscale_view()
    ax.set_xlim(left=0)
    return fig


def draw_waves(owners, slots, labels):
    """Work items on a device that runs `slots` of them at once: a column per wave.

    Args:    owners: list of int, whose item it is, in the order of launch
             slots: items that run at once;  labels: what the owners are called
    """
    num_waves = ceil_div(len(owners), slots)
    fig, ax = new_figure(9.0, 0.07 * slots + 1.0)
    for owner, label in enumerate(labels):
        places = [divmod(i, slots) for i, o in enumerate(owners) if o == owner]
        colour = SEQUENCE_COLOURS[owner % 6]
        ax.scatter([], [], marker="s", color=colour, label=label)
        for wave, slot in places:
            box(ax, wave, -slot, 1, 1, colour, line=0.3)
    for slot in range(len(owners), num_waves * slots):  # nothing left for these
        box(ax, num_waves - 1, -(slot % slots), 1, 1, UNUSED, line=0.3)
    ax.legend(
        ncols=len(labels), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1)
    )
    ax.autoscale_view()
    ax.set(xlabel="wave", ylabel=f"{slots} slots", yticks=[])
    return fig


def draw_path(steps, here):
    """The series as one path, numbered from 00, with the steps behind us filled and the one we are
    at framed.

    Args:    steps: list of str;  here: the current step, one of them
    """
    fig, ax = new_figure(9.0, 0.9)
    for i, step in enumerate(steps):
        done, current = i < steps.index(here), step == here
        colour = "#666666" if done else "white" if current else UNUSED
        box(ax, 1.1 * i, 0, 1, 1, colour, edge=INK if current else "none", line=2.5)
        ax.text(
            1.1 * i + 0.5, 0.5, f"{i:02d}\n" + step.replace("_", "\n"),
            fontsize=7.5, ha="center", va="center", color="white" if done else INK,
            weight="bold" if current else "normal",
        )  # fmt: skip
    finish(ax)
    return fig
