"""Pictures of a pool in use: who owns which block at each step, how much attention one gets."""

from .drawings import INK, SEQUENCE_COLOURS, UNUSED, new_figure


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
