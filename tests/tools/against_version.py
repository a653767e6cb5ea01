"""The plain call against another checkout's: python tests/tools/against_version.py <checkout>

Prints the median of the pairs' time ratios, new over old, three times, beside the same of the old
one against a second copy of itself: what differs less than those do is noise.
"""

import importlib
import statistics
import sys
import time
from pathlib import Path

import torch

CASES = [(1024, "HND", 400), (1024, "vllm", 300), (8192, "HND", 120), (8192, "NHD", 100)]
CASES += [(32768, "HND", 40)]


def load(checkout, *more):
    """A checkout's package, and more of its modules, none of which stays in sys.modules."""
    sys.path.insert(0, str(checkout))
    forget()
    modules = [importlib.import_module(name) for name in ("paged_attention", *more)]
    sys.path.pop(0)
    forget()
    return modules


def is_ours(name):
    return name.split(".")[0] == "paged_attention"


def forget():
    for name in [name for name in sys.modules if is_ours(name)]:
        del sys.modules[name]


def median_ratio(first, second, num_pairs):
    """Of second's time to first's; each follows the other as often as itself."""
    times = {first: [], second: []}
    for call in (first, second) * 2:
        call()
    for _ in range(num_pairs // 2):
        for call in (first, second, second, first):
            start = time.perf_counter()
            call()
            times[call].append(time.perf_counter() - start)
    return statistics.median(b / a for a, b in zip(times[first], times[second]))


def main(checkout):
    new, inputs = load(Path(__file__).parents[2], "paged_attention.inputs")
    olds = [load(checkout)[0] for _ in range(2)]
    for tokens, layout, num_pairs in CASES:
        num_blocks = tokens // 16
        cache = inputs.pack(*torch.randn(2, num_blocks, 16, 4, 256), layout)
        table = torch.randperm(num_blocks).to(torch.int32)[None]
        step = torch.randn(1, 24, 256), *cache, table, torch.tensor([tokens])
        old, again, ours = (
            lambda module=module, step=step, layout=layout: module.paged_attention(
                *step, layout=layout
            )
            for module in (*olds, new)
        )
        ratios = [[median_ratio(old, call, num_pairs) for call in (ours, again)] for _ in "123"]
        new_old, old_old = (" ".join(f"{r:.3f}" for r in column) for column in zip(*ratios))
        print(f"{tokens:6,} tokens, {layout:4s}: new/old {new_old}  old/old {old_old}")


if __name__ == "__main__":
    main(sys.argv[1])
