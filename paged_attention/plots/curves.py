"""Curves that a notebook draws from what it has just measured, against the floor.

(Figures of a whole run, redrawn from its JSON, are in `plots`.) Each function returns a matplotlib
Figure.
"""

import torch

from paged_attention.measure.machine import device_name
from paged_attention.measure.units import human_bytes, human_seconds
from paged_attention.plots.canvas import new_figure
from paged_attention.plots.style import FLOOR_COLOUR, STAGE_COLOURS, caption, log_axes

# Not a stage's colours: these stand for devices.
DEVICE_COLOURS = {"BI-V100": "#882255", "H200": "#332288"}
# Nor these, for kinds of operation: Paul Tol's "muted", light and dark in turns.
KIND_COLOURS = ("#332288", "#DDCC77", "#CC6677", "#117733", "#88CCEE", "#BBBBBB")


def draw_costs(measured, floors, *, predicted, shape):
    """Time and memory against length, log-log: medians with quartiles, predictions hollow, the
    floor (time) and K and V themselves (memory) dashed.

    Args:    measured: {stage: {tokens: Measurement}}
             floors: {tokens: Floor}
             predicted: {stage: {tokens: Figure in seconds}}, as `cost.predict` gives it
             shape: the workload, in words, for the caption
    """
    fig, (time, memory) = new_figure(9.0, 4.3, columns=2)
    tokens = list(floors)
    for place, (stage, by_tokens) in enumerate(measured.items()):
        # The first one is drawn broad, so that it shows under another that equals it.
        line = {"color": STAGE_COLOURS[stage], "linewidth": 1.6 if place else 5}
        line |= {"alpha": 1.0 if place else 0.55, "markersize": 6 if place else 9}
        low, high = zip(*(by_tokens[n].spread for n in tokens))
        seconds = [by_tokens[n].seconds for n in tokens]
        time.plot(tokens, seconds, "o-", label=stage, **line)
        time.fill_between(tokens, low, high, color=line["color"], alpha=0.15, linewidth=0)
        peaks = [by_tokens[n].peak_bytes for n in tokens]
        memory.plot(tokens, peaks, "o-", label=stage, **line)
    for stage, by_tokens in predicted.items():
        bands = [by_tokens[n] for n in tokens]
        middle = [(band.low * band.high) ** 0.5 for band in bands]
        time.errorbar(
            tokens,
            middle,
            yerr=[
                [m - band.low for m, band in zip(middle, bands)],
                [band.high - m for m, band in zip(middle, bands)],
            ],
            fmt="o:",
            color=STAGE_COLOURS[stage],
            markerfacecolor="none",
            markersize=9 if stage == next(iter(measured)) else 6,
            label=f"{stage}, predicted",
        )
    _floor_line(time, floors, "floor: K and V read once")
    num_bytes = [f.num_bytes for f in floors.values()]
    memory.plot(tokens, num_bytes, "--", color=FLOOR_COLOUR, label="K and V themselves")
    _finish(time, tokens, "time a step", human_seconds)
    _finish(memory, tokens, "peak memory of temporaries", human_bytes)
    device = device_name(next(iter(floors.values())).measurement.device)
    caption(
        fig,
        [
            f"{device}, torch {torch.__version__}; {shape}.",
            "Filled: medians; shaded: the middle half of samples. Hollow: predicted, as a band.",
        ],
    )
    return fig


def draw_floor(floors, profiles, *, bytes_per_token):
    """The floor measured here, and what published bandwidths predict for other devices.

    Args:    floors: {tokens: Floor}, measured
             profiles: {name: DeviceProfile}; those with a bandwidth are drawn, from its low to
                   its high figure
             bytes_per_token: of K and V together
    """
    fig, ax = new_figure(8.0, 4.2)
    device = device_name(next(iter(floors.values())).measurement.device)
    _floor_line(ax, floors, f"measured here: {device}")
    tokens = list(floors)
    for name, profile in profiles.items():
        if profile.bandwidth is None:
            continue
        fast, slow = (
            [n * bytes_per_token / bandwidth for n in tokens]
            for bandwidth in (profile.bandwidth.high, profile.bandwidth.low)
        )
        colour = DEVICE_COLOURS.get(name, "#117733")
        ax.fill_between(tokens, fast, slow, color=colour, alpha=0.25, linewidth=2)
        ax.plot(tokens, slow, ":", color=colour, label=f"predicted: {name}, published bandwidth")
    _finish(ax, tokens, "time to read K and V once", human_seconds)
    caption(fig, [f"torch {torch.__version__}; {bytes_per_token:,} bytes a token."])
    return fig


def draw_weights(heads):
    """Attention weights against position, one strip per head, log scale.

    Args:    heads: {title: (tokens,) tensor of weights}
    """
    fig, axes = new_figure(8.0, 1.8 * len(heads), rows=len(heads))
    axes = [axes] if len(heads) == 1 else list(axes)
    for ax, (title, weights) in zip(axes, heads.items()):
        positions, weights = range(len(weights)), weights.tolist()
        ax.vlines(positions, 1e-9, weights, color="#56B4E9", linewidth=0.6)
        ax.plot(positions, weights, ".", color="#0072B2", markersize=4)
        ax.set(yscale="log", ylim=(1e-7, 5), xlim=(-0.02 * len(weights), len(weights)))
        ax.set_ylabel("weight")
        ax.set_title(title, fontsize=10, loc="left")
    axes[-1].set_xlabel("position in the text")
    return fig


def _floor_line(ax, floors, label):
    seconds = [f.seconds for f in floors.values()]
    ax.plot(list(floors), seconds, "s--", markersize=4, color=FLOOR_COLOUR, label=label)


def _finish(ax, tokens, ylabel, human):
    log_axes(ax, tokens, "tokens in the cache", ylabel, human)
    ax.legend(fontsize=8, frameon=False)


def draw_lines(measured, *, xlabel, device, shape, floor=None):
    """Time against anything, log-log: one line for each name, medians with quartiles.

    Args:    measured: {name: {x: Measurement}}
             xlabel: what x is;  device, shape: for the caption
             floor: Floor, a dashed line across; None: no line
    """
    fig, ax = new_figure(8.0, 3.8)
    for (name, by_x), colour in zip(measured.items(), KIND_COLOURS[::2]):
        xs = list(by_x)
        low, high = zip(*(m.spread for m in by_x.values()))
        ax.plot(xs, [m.seconds for m in by_x.values()], "o-", color=colour, label=name)
        ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
    if floor is not None:
        label = "floor: K and V read once"
        ax.axhline(floor.seconds, color=FLOOR_COLOUR, linestyle="--", label=label)
    _finish(ax, xs, "time a step", human_seconds)
    ax.set_xlabel(xlabel)
    caption(fig, [f"{device_name(device)}, torch {torch.__version__}; {shape}."])
    return fig


def draw_breakdown(breakdowns, *, device, shape):
    """Time inside operations, by kind: one stacked bar for each call.

    Args:    breakdowns: {name: {kind: seconds}}, see `breakdown.breakdown`
             device: where they were measured;  shape: the workload, in words, for the caption
    """
    fig, ax = new_figure(9.0, 0.5 * len(breakdowns) + 1.4)
    kinds = list(next(iter(breakdowns.values())))
    for kind, colour in zip(kinds, KIND_COLOURS):
        lefts, widths = [], []
        for seconds in breakdowns.values():
            lefts.append(1e3 * sum(seconds[k] for k in kinds[: kinds.index(kind)]))
            widths.append(1e3 * seconds[kind])
        ax.barh(list(breakdowns), widths, left=lefts, color=colour, height=0.7, label=kind)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds inside operations")
    ax.legend(ncols=len(kinds), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    caption(fig, [f"{device_name(device)}, torch {torch.__version__}; {shape}."])
    return fig
