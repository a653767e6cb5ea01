"""Which rows must run: (case, layout, path, device), and the table of those that did.

A path is a way to get the same answer: one partition ("single tile"), two phases with partitions
of one or four blocks, a plan for these lengths ("exact") or for longer ones ("capacity"), each
lesson stage (they know the vllm layout alone, and no option), the float64 reference, a merge.
"""

from __future__ import annotations

import torch
from helpers import STAGE_NAMES
from pools import LAYOUTS
from ways import PLANS

PAGED = ("single tile", "P=bs", "P=4bs")


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
    """A line for each case: per path the layouts in which it ran (v, H, N: vllm, HND, NHD) and how
    many results were judged."""
    for number in THE_WHOLE_LIST:
        cells = {}
        for (case, layout, path, device), count in sorted(judged.items()):
            if case == number:
                where = "stages" if path in STAGE_NAMES else path
                layouts, total = cells.get((device, where), ("", 0))
                mark = "" if where == "stages" else layout[0]
                cells[device, where] = layouts + mark, total + count
        line = ", ".join(f"{path} {marks} {n}" for (_, path), (marks, n) in cells.items())
        yield f"{number}  {line or 'did not run'}"
    for number, what in VLLM.items():
        yield f"{number}  in test_vllm_ops.py: {what}"
