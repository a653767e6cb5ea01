"""Which rows must run: (case, layout, path, device), and the table of those that did.

A path is a way to get the same answer: one partition ("single tile"), two phases with partitions
of one or four blocks, a plan for these lengths ("exact") or for longer ones ("capacity"), each
lesson stage (they know the vllm layout alone, and no option), the float64 reference, a merge.
"""

from __future__ import annotations

import torch
from helpers import LAYOUTS, STAGE_NAMES

PAGED = ("single tile", "P=bs", "P=4bs")
PLANS = ("exact", "capacity")


def each_layout(*paths, stages=()):
    return {layout: paths + (stages if layout == "vllm" else ()) for layout in LAYOUTS}


KERNEL = each_layout(*PAGED, *PLANS, "reference")
EVERY_PATH = each_layout(*PAGED, *PLANS, "reference", stages=STAGE_NAMES)

ROWS = {
    "PUB-01": {k: ("pack", *v) for k, v in EVERY_PATH.items()},
    "PUB-02": KERNEL,
    "PUB-03": EVERY_PATH,
    "PUB-04": each_layout("P=512", "P=4096", *PLANS, "reference", stages=STAGE_NAMES),
    "PUB-05": EVERY_PATH,
    "PUB-06": {"-": ("merge",)},
    "PUB-07": {**EVERY_PATH, "-": ("merge",)},
    "PUB-08": EVERY_PATH,
    "PUB-09": EVERY_PATH,
    "PUB-10": each_layout("single tile", "P=512", *PLANS, stages=STAGE_NAMES),
    "PUB-11": KERNEL,
    "PUB-12": KERNEL,
    "PUB-13": KERNEL,
    "PUB-14": EVERY_PATH,
    "PUB-15": each_layout("default", *PLANS),
    "PUB-16": EVERY_PATH,
    "PUB-17": EVERY_PATH,
    "PUB-18": each_layout(
        "single tile", "P=512", *PLANS, stages=("gqa_broadcast", "single_tile", "fused_phase2")
    ),
    "PUB-19": KERNEL,
    "PUB-20": KERNEL,
    "PUB-21": each_layout("P=256", "default", *PLANS),
    "PUB-22": EVERY_PATH,
    "PUB-23": KERNEL,
    "PUB-24": each_layout("single tile", "P=bs", "P=512", *PLANS),
    "PUB-25": {"-": ("measure",)},
}
VLLM = {  # what a case says of vLLM's own ops: tests/test_vllm_ops.py
    "PUB-01": "the op called with vLLM's signature",
    "PUB-12": "a sink merged with what V1 and V2 give",
    "PUB-19": "scales given by position; the V1 and V2 ops",
    "PUB-22": "a tmp_out of the caller's, in float16 and in float32",
}
ON_CPU_ONLY = ("PUB-25",)
THE_WHOLE_LIST = [f"PUB-{n:02d}" for n in range(1, 26)]


def rows_of(case, device):
    """The rows of a case on "cpu" or "cuda"."""
    if device == "cuda" and (case in ON_CPU_ONLY or (case == "PUB-15" and _small_device())):
        return []
    table = ROWS[case]
    return [(case, layout, path, device) for layout, paths in table.items() for path in paths]


def _small_device():
    """PUB-15 takes 8 GiB: on a CPU they are promised, not used."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(0).total_memory < 10 * 2**30


def required_rows():
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return {row for device in devices for case in THE_WHOLE_LIST for row in rows_of(case, device)}


def table_of(judged):
    """A line for each case, a column for each path; a cell says in which layouts it ran (v, H, N:
    vllm, HND, NHD; of the stages: which) and how many results were judged."""
    paths = dict.fromkeys(path for _, _, path, _ in sorted(judged) if path not in STAGE_NAMES)
    columns = sorted(paths, key=[*PAGED, *PLANS, *paths].index) + ["stages"]
    for device in dict.fromkeys(row[3] for row in judged):
        yield f"{device:8}" + "".join(f"{column:>12}" for column in columns)
        for number in THE_WHOLE_LIST:
            mine = {r[1:3]: n for r, n in judged.items() if (r[0], r[3]) == (number, device)}
            cells = {column: ["", 0] for column in columns}
            for (layout, path), judged_here in sorted(mine.items()):
                stage = path in STAGE_NAMES
                cell = cells["stages" if stage else path]
                cell[0] += str(STAGE_NAMES.index(path) + 1) if stage else layout[0]
                cell[1] += judged_here
            line = "".join(
                f"{''.join(sorted(w)) + f' {n}' if n else '':>12}" for w, n in cells.values()
            )
            yield f"{number:8}" + (line.rstrip() if mine else "  did not run")
    for number, what in VLLM.items():
        yield f"{number:8}  in test_vllm_ops.py: {what}"
