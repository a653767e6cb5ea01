"""Curves that a notebook draws from what it has just measured, against the floor.

(Figures of a whole run, redrawn from its JSON, are in `plots`.) Each function returns a matplotlib
Figure.
"""

from .drawings import new_figure
from .plots import FLOOR_COLOUR, STAGE_COLOURS


def draw_times(measured, floors, *, predicted=None):
    """Time against length, log-log: medians with quartiles, predictions hollow, the floor dashed.

    Args:    measured: {stage: {tokens: Measurement}}
             floors: {tokens: Floor}
             predicted: {stage: {tokens: seconds}}
    """
    fig, ax = new_figure(7.5, 4.2)
    for stage, by_tokens in measured.items():
        tokens = list(by_tokens)
        medians = [by_tokens[n].seconds for n in tokens]
        low, high = zip(*(by_tokens[n].spread for n in tokens))
        colour = STAGE_COLOURS[stage]
        ax.plot(tokens, medians, "o-", color=colour, label=f"{stage}, measured")
        ax.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
    for stage, by_tokens in (predicted or {}).items():
        ax.plot(
            list(by_tokens),
            list(by_tokens.values()),
            "o:",
            color=STAGE_COLOURS[stage],
            markerfacecolor="none",
            label=f"{stage}, predicted",
        )
    _floor_line(ax, floors)
    _finish(ax, list(floors), "tokens in the cache", "seconds a step")
    return fig


def draw_floor(floors, profiles, *, bytes_per_token=8192):
    """The floor measured here, and what published bandwidths predict for other devices.

    Args:    floors: {tokens: Floor}, measured
             profiles: {name: DeviceProfile}, those with a bandwidth are drawn, as a band
             bytes_per_token: of K and V together
    """
    fig, ax = new_figure(7.5, 4.0)
    _floor_line(ax, floors)
    tokens = list(floors)
    for (name, profile), colour in zip(profiles.items(), ("none", "#D55E00", "#0072B2")):
        if profile.bandwidth is None:
            continue
        fast, slow = (
            [n * bytes_per_token / bandwidth for n in tokens]
            for bandwidth in (profile.bandwidth.high, profile.bandwidth.low)
        )
        ax.fill_between(tokens, fast, slow, color=colour, alpha=0.25, linewidth=1.5)
        ax.plot(tokens, slow, ":", color=colour, label=f"{name}, predicted from its bandwidth")
    _finish(ax, tokens, "tokens in the cache", "seconds to read K and V once")
    return fig


def draw_weights(heads):
    """Attention weights against position, one strip per head, log scale.

    Args:    heads: {title: (tokens,) tensor of weights}
    """
    fig, axes = new_figure(7.5, 1.7 * len(heads), rows=len(heads))
    for ax, (title, weights) in zip(axes, heads.items()):
        ax.vlines(range(len(weights)), 1e-9, weights.tolist(), color="#0072B2", linewidth=0.6)
        ax.set(yscale="log", ylim=(1e-7, 2), xlim=(-0.01 * len(weights), len(weights)))
        ax.set_ylabel("weight")
        ax.set_title(title, fontsize=10, loc="left")
    axes[-1].set_xlabel("position in the text")
    fig.tight_layout()
    return fig


def _floor_line(ax, floors):
    seconds = [f.seconds for f in floors.values()]
    label = "floor: K and V read once, measured"
    ax.plot(list(floors), seconds, "--", color=FLOOR_COLOUR, label=label)


def _finish(ax, tokens, xlabel, ylabel):
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.set_xticks(tokens, [f"{n:,}" for n in tokens])
    ax.minorticks_off()
    ax.grid(True, color="#E5E5E5", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.legend(fontsize=8, frameon=False)
    ax.figure.tight_layout()
