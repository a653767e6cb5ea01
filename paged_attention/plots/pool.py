"""Pictures of a pool in use: who owns which block at each step, how much attention one gets."""

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


def draw_history(history, num_blocks):
    """A pool over time: a column for each step, a row for each block, coloured by its owner.

    Args:    history: for each step, {sequence: list of its block ids}; a block of several owners
                   is drawn dark
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
    colours = [UNUSED, *(SEQUENCE_COLOURS[i % 6] for i in range(len(names))), INK]
    fig, ax = new_figure(8.0, 4.4)
    ax.imshow(
        grid, cmap=ListedColormap(colours), vmin=0, vmax=shared, aspect="auto",
        interpolation="nearest", origin="lower",
    )  # fmt: skip
    labels = dict(zip(["free", *names, "shared"], colours))
    handles = [Patch(facecolor=colour, label=label) for label, colour in labels.items()]
    ax.legend(
        handles=handles, ncols=len(handles), fontsize=8, frameon=False, loc="lower left",
        bbox_to_anchor=(0, 1),
    )  # fmt: skip
    ax.set(xlabel="step", ylabel="block of the pool")
    ax.grid(False)
    return fig


def draw_mass(mass, titles):
    """Attention over blocks: a strip for each query head, dark where its weight is.

    Args:    mass: (heads, blocks), which sums to 1 over the blocks;  titles: of the heads
    """
    from matplotlib.colors import LogNorm

    fig, ax = new_figure(9.0, 0.3 * len(titles) + 1.3)
    image = ax.imshow(
        mass.clamp_min(1e-6).tolist(), cmap="Blues", norm=LogNorm(1e-5, 1), aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    ax.set_yticks(range(len(titles)), titles, fontsize=8)
    ax.set_xlabel("block of the sequence, in logical order")
    ax.grid(False)
    fig.colorbar(image, ax=ax, label="share of attention", pad=0.01)
    return fig


def draw_pool(cache, seq_ids, *, blocks_per_row=6):
    """The pool of a PagedKVCache: one box per block, one cell per slot, coloured by owner.

    Args:    cache: a PagedKVCache
             seq_ids: the sequences to show; a slot holds its sequence and position ("A17"), in
                   the colour of the first of seq_ids that owns it; a block with several owners is
                   framed
    """
    block_size, num_blocks = cache.geometry.block_size, cache.geometry.num_blocks
    tables, lens = cache.block_tables(seq_ids).tolist(), cache.seq_lens(seq_ids).tolist()
    owners = {}  # block -> [(sequence's place in seq_ids, first position in the block)]
    for seq, (row, seq_len) in enumerate(zip(tables, lens)):
        for i, block in enumerate(row[: ceil_div(seq_len, block_size)]):
            owners.setdefault(block, []).append((seq, i * block_size))

    num_rows = ceil_div(num_blocks, blocks_per_row)
    fig, ax = new_figure(8.0, 0.62 * num_rows + 0.1)
    for block in range(num_blocks):
        row, column = divmod(block, blocks_per_row)
        left, bottom = column * (block_size + 1.0), -1.6 * row
        ax.text(left, bottom + 1.08, f"block {block}", fontsize=7.5, color=INK, va="bottom")
        for offset in range(block_size):
            held = [
                (seq, start + offset)
                for seq, start in owners.get(block, ())
                if start + offset < lens[seq]
            ]
            colour = SEQUENCE_COLOURS[held[0][0] % 6] if held else UNUSED
            box(ax, left + offset, bottom, 1, 1, colour)
            if held:
                label = f"{seq_ids[held[0][0]]}{held[0][1]}"
                ax.text(
                    left + offset + 0.5, bottom + 0.5, label,
                    fontsize=6, color=text_colour(colour), ha="center", va="center",
                )  # fmt: skip
        if len(owners.get(block, ())) > 1:
            box(ax, left, bottom, block_size, 1, "none", edge=INK, line=2)
    finish(ax)
    return fig
