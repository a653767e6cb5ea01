"""The plain call against another checkout's, in turns: python tests/against_version.py <checkout>

Prints the median of the pairs' time ratios, new over old, three times, beside the same of the old
one against a second copy of itself: what differs less than those do is noise.
"""

import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch

CASES = [(1024, "HND", 400), (1024, "vllm", 300), (8192, "HND", 120), (8192, "NHD", 100)]
CASES += [(32768, "HND", 40)]


def load(name, checkout):
    folder = Path(checkout) / "paged_attention"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    new = load("new", Path(__file__).parents[2])
    olds = load("old", checkout), load("old_again", checkout)
    pack = importlib.import_module("new.layouts").pack
    for tokens, layout, num_pairs in CASES:
        num_blocks = tokens // 16
        cache = pack(*torch.randn(2, num_blocks, 16, 4, 256), layout)
        table = torch.randperm(num_blocks).to(torch.int32)[None]
        inputs = torch.randn(1, 24, 256), *cache, table, torch.tensor([tokens])
        old, again, ours = (
            lambda module=module, inputs=inputs, layout=layout: module.paged_attention(
                *inputs, layout=layout
            )
            for module in (*olds, new)
        )
        ratios = [[median_ratio(old, call, num_pairs) for call in (ours, again)] for _ in "123"]
        new_old, old_old = (" ".join(f"{r:.3f}" for r in column) for column in zip(*ratios))
        print(f"{tokens:6,} tokens, {layout:4s}: new/old {new_old}  old/old {old_old}")


if __name__ == "__main__":
    main(sys.argv[1])
