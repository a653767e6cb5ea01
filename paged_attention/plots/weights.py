"""Pictures of attention's weights, by token and by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paged_attention.plots.canvas import listed, new_panels
from paged_attention.plots.picture import Picture


def draw_weights(heads: Mapping[str, torch.Tensor]) -> Picture:
    """Attention weights against position, log scale: a strip for each head.

    Args:    heads: {title: (tokens,), weights}
    """
    figure, panels = new_panels(8.0, *[1.8] * len(heads))
    for ax, (title, weights) in zip(panels, heads.items()):
        tokens = len(weights)
        ax.vlines(range(tokens), 1e-9, weights.tolist(), color="#56B4E9", linewidth=0.6)
        ax.plot(range(tokens), weights.tolist(), ".", color="#0072B2", markersize=4)
        ax.set(yscale="log", ylim=(1e-7, 5), xlim=(-0.02 * tokens, tokens), ylabel="weight")
        ax.set_title(title, fontsize=10, loc="left")
    panels[-1].set_xlabel("position in the text")
    largest = listed(f"{title}, largest {float(w.max()):.2g}" for title, w in heads.items())
    alt = f"Attention weights against position: {largest}."
    return Picture(figure, alt)


def draw_mass(mass: torch.Tensor, titles: Sequence[str]) -> Picture:
    """Attention over blocks: a strip for each query head, dark where its weight is.

    Args:    mass: (heads, blocks), which sums to 1 over the blocks
             titles: of the heads
    """
    from matplotlib.colors import LogNorm

    figure, [ax] = new_panels(9.0, 0.3 * len(titles) + 1.3)
    image = ax.imshow(
        mass.clamp_min(1e-6).tolist(), cmap="Blues", norm=LogNorm(1e-5, 1), aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    ax.set_yticks(range(len(titles)), titles, fontsize=8)
    ax.set_xlabel("block of the sequence, in logical order")
    ax.grid(False)
    figure.colorbar(image, ax=ax, label="share of attention", pad=0.01)
    most = listed(f"{title} in block {int(row.argmax())}" for title, row in zip(titles, mass))
    alt = f"The share of attention that each block has; most of it has {most}."
    return Picture(figure, alt)
