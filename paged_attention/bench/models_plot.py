"""The picture of a run over the shapes of real models: each row's time over that of others."""

from __future__ import annotations

from typing import Any

from paged_attention.bench.captions import hardware
from paged_attention.bench.models import MODELS
from paged_attention.bench.models_table import CALL, SDPA, SHORT, VLLM, seconds_of
from paged_attention.plots.style import FLOOR_COLOUR, WIDTH, Axes, Figure, caption, style

_COLOURS = dict(zip(MODELS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")))
_MARKS = {"fp32": "o", "fp16": "^", "bf16": "s", "fp8": "D"}
_OTHERS = {SDPA: "gather and SDPA", VLLM: "vLLM's CPU operation"}


def draw_models(run: dict[str, Any]) -> Figure:
    """Our call's time divided by another's, against the tokens of the whole batch.

    Args:    run: what `models` makes and models.json holds
    """
    from matplotlib.figure import Figure

    others = [name for name in _OTHERS if any(name in seconds_of(step) for step in run["rows"])]
    with style():
        figure = Figure(figsize=(WIDTH, 1.2 + 3.2 * len(others)), layout="constrained")
        title = "One decode step of real models' shapes: our call beside others"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        panels = figure.subplots(len(others), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, others):
            _draw_ratios(axes, run["rows"], name)
        panels[-1].set_xlabel("tokens in the cache, of the whole batch")
        panels[0].legend(
            handles=_legend(), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
            fontsize=8.5,
        )  # fmt: skip
        lines = [
            f"{hardware(run)}.",
            "Medians, timed in turns. Hollow marks have four query tokens. Layout HND, blocks of "
            "16 tokens. Below the dashed line our call is faster.",
        ]
        caption(figure, lines)
    return figure


def _draw_ratios(axes: Axes, rows: list[dict[str, Any]], other: str) -> None:
    for step in rows:
        seconds = seconds_of(step)
        if CALL in seconds and other in seconds:
            colour = _COLOURS[step["model"]]
            axes.plot(
                step["context"], seconds[CALL] / seconds[other],
                _MARKS[SHORT[step["shape"]["dtype"]]], color=colour, ms=6,
                mfc="white" if step["shape"]["q_len"] > 1 else colour,
            )  # fmt: skip
    axes.axhline(1, color=FLOOR_COLOUR, lw=1.2, ls=(0, (4, 2)))
    axes.set(xscale="log", yscale="log", ylabel="time, ours / theirs", title=_OTHERS[other])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(True, axis="both", color="#E9E9E9", linewidth=0.6)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    line: dict[str, Any] = {"ls": "", "ms": 6}
    models = [Line2D([], [], marker="o", color=c, label=n, **line) for n, c in _COLOURS.items()]
    caches = [
        Line2D([], [], marker=m, color="#777777", label=n, **line) for n, m in _MARKS.items()
    ]
    return [*models, *caches]
