"""figures/README.md: the devices that were measured, made from the files beside it.

.venv/bin/python tests/tools/figures_readme.py        `make figures` runs it, too
"""

from __future__ import annotations

import json
from pathlib import Path

from paged_attention.bench.captions import hardware
from paged_attention.bench.ladder import results_of
from paged_attention.measure.units import human_seconds, ratio

FIGURES = Path(__file__).resolve().parents[2] / "figures"
HEAD = """\
# Devices

Each row is a ladder that somebody measured. `make figures` makes this page from the files, so
don't edit it. [Your device's numbers](../docs/contributing.md#your-devices-numbers) says how to
send in another.

The last three columns are of one sequence, the longest that was measured. *Kernel* is the time of
the kernel in the layout that is fastest there.

| device | dtype | measured on | tokens | kernel | in multiples of the floor |
|---|---|---|--:|--:|--:|
"""
KERNELS = ("paged_attention", "paged_attention_HND", "paged_attention_NHD")


def page(figures=FIGURES):
    """The page's text."""
    sources = sorted(figures.rglob("ladder.json"))
    return HEAD + "".join(row(s, figures) for s in sources if figures / "local" not in s.parents)


def row(source, figures):
    run = json.loads(source.read_text(encoding="utf-8"))
    step = max(run["contexts"], key=lambda step: step["context"])
    times = {r["name"]: r["seconds"] for r in results_of(step) if "seconds" in r}
    ours = [times[name] for name in KERNELS if name in times]
    floor = step["floor"]
    cells = (
        f"[{hardware(run)}]({source.relative_to(figures).as_posix()})",
        run["shape"]["dtype"],
        run["date"][:10],
        f"{step['context']:,}",
        human_seconds(min(ours)) if ours else "",
        ratio(min(ours) / floor["seconds"]) if ours and floor else "",
    )
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    (FIGURES / "README.md").write_text(page(), encoding="utf-8")
