"""Pictures of a pool of blocks: who owns which block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_attention.cache import PagedKVCache
from paged_attention.kernel.partition import ceil_div
from paged_attention.plots.canvas import (
    INK,
    UNUSED,
    box,
    finish,
    legend_above,
    listed,
    new_panels,
    sequence_colour,
)
from paged_attention.plots.picture import Picture


def draw_history(history: Sequence[Mapping[str, Sequence[int]]], num_blocks: int) -> Picture:
    """A pool over time: a column for each step, a row for each block, coloured by its owner.

    Args:    history: for each step, {sequence: its block ids}; a block that several sequences own
                   is drawn dark
             num_blocks: of the pool
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for tables in history for name in tables))
    shared = len(names) + 1
    grid = [[0] * len(history) for _ in range(num_blocks)]
    for step, tables in enumerate(history):
        for owner, name in enumerate(names, 1):
            for block in tables.get(name, ()):
                grid[block][step] = shared if grid[block][step] else owner
    colours = [UNUSED, *map(sequence_colour, range(len(names))), INK]
    figure, [ax] = new_panels(8.0, 4.4)
    ax.imshow(
        grid, cmap=ListedColormap(colours), vmin=0, vmax=shared, aspect="auto",
        interpolation="nearest", origin="lower",
    )  # fmt: skip
    labels = dict(zip(["free", *names, "shared"], colours))
    handles = [Patch(facecolor=colour, label=label) for label, colour in labels.items()]
    legend_above(ax, len(handles), handles=handles)
    ax.set(xlabel="step", ylabel="block of the pool")
    ax.grid(False)
    alt = f"The owner of each of {num_blocks} blocks over {len(history)} steps: {listed(names)}."
    return Picture(figure, alt)


def draw_pool(cache: PagedKVCache, seq_ids: Sequence[str], *, blocks_per_row: int = 6) -> Picture:
    """A pool of blocks as it is now: a box for each block, a cell for each slot.

    A slot shows the sequence that owns it and the token's position ("A17"), in that sequence's
    colour. Of several owners it shows the one that comes first in `seq_ids`, and the block is
    framed.

    Args:    cache: the pool
             seq_ids: the sequences to show
             blocks_per_row: boxes beside each other
    """
    block_size, num_blocks = cache.geometry.block_size, cache.geometry.num_blocks
    tables, lens = cache.block_tables(seq_ids).tolist(), cache.seq_lens(seq_ids).tolist()
    # block -> [(index into seq_ids, first position in the block), ...]
    owners: dict[int, list[tuple[int, int]]] = {}
    for seq, (row, seq_len) in enumerate(zip(tables, lens)):
        for i, block in enumerate(row[: ceil_div(seq_len, block_size)]):
            owners.setdefault(block, []).append((seq, i * block_size))

    figure, [ax] = new_panels(8.0, 0.62 * ceil_div(num_blocks, blocks_per_row) + 0.1)
    for block in range(num_blocks):
        row, column = divmod(block, blocks_per_row)
        left, bottom = column * (block_size + 1.0), -1.6 * row
        first = block * block_size
        title = f"block {block}: slots {first} to {first + block_size - 1}"
        ax.text(left, bottom + 1.08, title, fontsize=7.5, color=INK, va="bottom")
        for offset in range(block_size):
            held = [
                (seq, start + offset)
                for seq, start in owners.get(block, ())
                if start + offset < lens[seq]
            ]
            colour, text = UNUSED, ""
            if held:
                seq, position = held[0]
                colour, text = sequence_colour(seq), f"{seq_ids[seq]}{position}"
            box(ax, left + offset, bottom, 1, 1, colour, text=text, text_size=6)
        if len(owners.get(block, ())) > 1:
            box(ax, left, bottom, block_size, 1, "none", edgecolor=INK, linewidth=2)
    finish(ax)
    held_by = (
        f"{seq_id} has {n} tokens in blocks {listed(row[: ceil_div(n, block_size)])}"
        for seq_id, row, n in zip(seq_ids, tables, lens)
    )
    alt = f"A pool of {num_blocks} blocks: " + "; ".join(held_by) + "."
    return Picture(figure, alt)
