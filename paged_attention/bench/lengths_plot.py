"""Time and memory against the length of the sequence, drawn from a ladder's JSON dictionary."""

from __future__ import annotations

from paged_attention.bench.captions import hardware, workload
from paged_attention.measure.units import human_bytes, human_seconds
from paged_attention.plots.style import FLOOR_COLOUR, WIDTH, caption, log_axes, mark_of, style


def draw_lengths(data: dict):
    """Every stage, the kernel, its peers and the floor: time above, memory below.

    Args:    data: what `ladder.describe` and `ladder.StepRun.entry` make, as in ladder.json
    Returns: matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    entries = sorted(data["contexts"], key=lambda entry: entry["context"])
    tokens = [entry["context"] for entry in entries]
    with style():
        figure = Figure(figsize=(WIDTH, 7.6), layout="constrained")
        time, memory = figure.subplots(2, 1, height_ratios=(1.6, 1))
        for name, points in _by_name(entries).items():
            _draw_times(time, name, points)
            _draw_peaks(memory, name, points)
        floors = [(entry["context"], entry["floor"]) for entry in entries if entry["floor"]]
        line = {"color": FLOOR_COLOUR, "lw": 1.5, "ls": (0, (4, 2))}
        time.plot([n for n, _ in floors], [f["seconds"] for _, f in floors], label="floor", **line)
        kv_bytes = [entry["kv_bytes"] for entry in entries]
        memory.plot(tokens, kv_bytes, color=FLOOR_COLOUR, lw=1.5, ls=":", label="K and V")
        log_axes(time, tokens, "", "time a step", human_seconds)
        log_axes(memory, tokens, "tokens in the cache", "peak memory", human_bytes)
        for axes in (time, memory):
            handles, labels = axes.get_legend_handles_labels()
            axes.legend(
                *_highest_first(handles, labels),
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                frameon=False,
                fontsize=8.5,
            )
        figure.suptitle(
            "One decode step of PagedAttention V2, against length",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        lines = [
            f"{hardware(data)}.",
            f"{workload(data)}.",
            "Medians, shaded the middle half of the samples; the floor is torch.mv reading as "
            "many bytes as K and V hold.",
        ]
        if data["interrupted"]:
            lines.append("The run was interrupted: this is what it had measured.")
        caption(figure, lines)
    return figure


def _by_name(entries: list[dict]) -> dict[str, list[tuple[int, dict]]]:
    """{stage or peer: [(tokens, result), ...]}, of those that were timed."""
    points: dict[str, list[tuple[int, dict]]] = {}
    for entry in entries:
        for result in entry["stages"] + entry.get("peers", []):
            if "seconds" in result:
                points.setdefault(result["name"], []).append((entry["context"], result))
    return points


def _draw_times(axes, name: str, points) -> None:
    colour, mark = mark_of(name)
    tokens = [n for n, _ in points]
    low, high = zip(*(result["spread"] for _, result in points))
    seconds = [result["seconds"] for _, result in points]
    axes.plot(tokens, seconds, mark, ls="-", color=colour, ms=5, lw=1.4, label=name)
    axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0)


def _draw_peaks(axes, name: str, points) -> None:
    colour, mark = mark_of(name)
    counted = [(n, result["peak_bytes"]) for n, result in points if result["peak_bytes"]]
    if counted:
        axes.plot(*zip(*counted), mark, ls="-", color=colour, ms=5, lw=1.4, label=name)


def _highest_first(handles, labels):
    """The legend in the order in which the lines end."""
    order = sorted(range(len(handles)), key=lambda i: -handles[i].get_ydata()[-1])
    return [handles[i] for i in order], [labels[i] for i in order]
