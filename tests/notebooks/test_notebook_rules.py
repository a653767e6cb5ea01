"""The rules for what a cell prints: what they catch, and what they allow."""

from __future__ import annotations

import pytest
from notebook_cells import IGNORED, code_cells, notebook_of
from notebook_kinds import misplaced
from notebook_literals import literal_claims

pytestmark = pytest.mark.quick

LITERALS = {
    "a number": "print(6250)",
    "a number in text": 'print("27 ops")',
    "a number in an f-string's text": 'print(f"ops: 27 of {model}")',
    "a number beside a computed one": "print(model, 6250)",
    "a constant given two names": "x = 3\ny = x\nprint(y)",
    "a comparison of constants": "x = 27\nprint(x == 27)",
    "math on constants": "print(math.ceil(100_000 / 512))",
    "a tautology": 'x = 3\ncheck("x", x, "==", 3)',
    "a value against itself": 'check("ops", counts.ops, "==", counts.ops)',
    "a constant formatted": 'print("{} ops".format(27))',
    "a constant concatenated": 'print("ops " + str(27))',
    "a joined constant beside a computed one": 'print(" ".join([str(model), "27"]))',
    "a separator": 'print("ops", model, sep=" 27 ")',
    "a constant by condition": "print(27 if model else 28)",
    "a constant printed in a function": "def show(n):\n    print(n)\nshow(27)",
    "a constant appended": "ops = []\nops.append(27)\nprint(ops[0])",
    "a list filled from literals": "d = []\nfor n in (1, 2):\n    d.append(n)\nprint(d)",
    "a constant under with": "with torch.no_grad():\n    x = 27\nprint(x)",
    "loop variables alone": "for ops in (27, 28):\n    print(ops)",
    "a comprehension of constants": "print([n for n in (27, 28)])",
    "a print in a comprehension": "[print(n) for n in (27, 28)]",
    "a displayed name": "x = 27\nx",
    "a claim in words": 'print("all stages agree")',
    "a verdict in words": 'print("agrees: True")\nprint(model)',
    "a constant of another cell": ("ops = 27", "print(ops)"),
    "a check on a constant of another cell": ("ops = 27", 'check("ops", ops, "==", 27)'),
}
COMPUTED = {
    "a name from elsewhere": 'print("ops", counts.ops)',
    "a call on constants": "print(blocks_of(100_000, 16))",
    "a formula on named inputs": (
        "tokens, block = 100_000, 16\nblocks = -(-tokens // block)\n"
        'print("blocks", blocks, "bytes", tokens * 4)'
    ),
    "a formula in a function": "def ops(n):\n    return 9 * n\nn = 27\nprint(ops(n), ops(28))",
    "a check of a formula": (
        "worst = max(-(-n // 16) * 16 - n for n in range(1, 5000))\n"
        'check("slots wasted", worst, "==", 15)'
    ),
    "an exercise": 'exercise("blocks", blocks, lambda answer: answer == 6250)',
    "a constant of another cell as a label": (
        "tokens, block = 100_000, 16",
        'print("tokens", tokens, "blocks", -(-tokens // block))',
    ),
    "a check with numbers in label and bound": 'check("ops at 100K", err, "<=", 1e-5)',
    "names that hold digits": 'print("fp32", "V2", "H200", "Phase 2", "Q@K^T", counts.gemms)',
    "a width": 'print(f"{name:>12} {counts.ops:8,}", "%-8d" % counts.ops)',
    "a line and a header": 'print("stage", "ops")\nprint("-" * 40)\nprint(name, counts.ops)',
    "rows labelled by a loop": "for n in (1_024, 100_000):\n    print(n, ops_at(n))",
    "rows of a table": 'for name, fn in STAGES.items():\n    print(f"{name:16}", count(fn).ops)',
    "a counter": "n = 0\nfor block in table:\n    n += 1\nprint(n)",
    "a list filled by a loop": "rows = []\nfor fn in fns:\n    rows.append(fn())\nprint(rows)",
    "a list filled by a call": "rows = []\nfill(rows)\nprint(rows)",
    "a flag that an exception sets": (
        "crashed = False\ntry:\n    f()\nexcept RuntimeError:\n    crashed = True\nprint(crashed)"
    ),
    "words that an exception picks": (
        'try:\n    f()\n    print("no error")\nexcept IndexError:\n    print("refused")'
    ),
    "words that a test picks": 'print("equal" if torch.equal(a, b) else "different")',
    "a silent cell": "tokens, block = 100_000, 16\nq = torch.zeros(24, 256)",
    "an ignored cell": ("print(27, time.perf_counter())", IGNORED),
    "a docstring and a function": '"""27 ops."""\n\nimport torch\n\n\ndef f():\n    return 27',
}
IMPORTS = """import time, torch, platform
import matplotlib.pyplot as plt
from paged_attention import plots
from paged_attention.bench import draw_ladder
from paged_attention.cost import PROFILES, predict
from paged_attention.measure import calibrate, count, measure, profiler_peak_bytes
"""
DIFFERS_BY_MACHINE = {
    "a time in text": 'print(f"{measure(fn).seconds * 1e3:.1f} ms")',
    "a time from a clock": "start = time.perf_counter()\nfn()\nprint(time.perf_counter() - start)",
    "a time from a loop": "for t in [measure(f).seconds for f in fns]:\n    print(t)",
    "a time from a list": "took = []\ntook.append(time.perf_counter())\nprint(took[0])",
    "a time from a function": "def took(f):\n    return measure(f).seconds\nprint(took(fn))",
    "a figure from the profiler": "print(profiler_peak_bytes(fn))",
    "a prediction for this machine": "print(predict(name, shape, calibrate()).seconds.low)",
    "the same by name": "p = calibrate()\nprint(predict(name, shape, profile=p).seconds.low)",
    "a picture": "plots.ladder(rows)",
    "a picture by pyplot": "plt.plot(xs)",
    "a device's name": "print(torch.cuda.get_device_name())",
    "a device's name by name": (
        'device = "cuda" if torch.cuda.is_available() else "cpu"\nprint(device)'
    ),
    "a machine": "print(platform.processor())",
}
SAME_EVERYWHERE = {
    "counts": "c = count(fn)\nprint(c.ops, c.gemms, c.host_reads, c.peak_bytes)",
    "counts of measurements": "rows = [measure(f) for f in fns]\nfor r in rows:\n    print(r.ops)",
    "a prediction from published figures": (
        'band = predict(name, shape, PROFILES["H200"]).seconds\nprint(band.low)'
    ),
    "a check on memory": 'check("peak", profiler_peak_bytes(fn), "<=", bound)',
    "a shape on a device": (
        'device = "cuda" if torch.cuda.is_available() else "cpu"\n'
        "x = torch.ones(2, device=device)\nprint(x.shape)"
    ),
}
NEVER = {
    "a count, ignored": ("print(count(fn).ops)", IGNORED),
    "a time checked": ('check("faster", measure(fn).seconds, "<", 1.0)', IGNORED),
    "a time asserted": ("t = measure(fn).seconds\nassert t < 1", IGNORED),
}


def cells_of(source):
    """One cell, or a tuple: (a cell, its tag) or the cells one after the other."""
    if isinstance(source, str) or source[-1] == IGNORED:
        source = (source,)
    return code_cells(notebook_of(*source))


def each(examples):
    return pytest.mark.parametrize("source", examples.values(), ids=examples)


@each(LITERALS)
def test_a_claim_that_is_a_literal_of_its_cell_is_caught(source):
    assert literal_claims(cells_of(source))


@each(COMPUTED)
def test_a_claim_that_something_computes_is_allowed(source):
    assert literal_claims(cells_of(source)) == []


@each(DIFFERS_BY_MACHINE)
def test_what_differs_by_machine_is_ignored_and_never_compared(source):
    assert misplaced(cells_of((IMPORTS, source)))
    assert misplaced(code_cells(notebook_of(IMPORTS, (source, IGNORED)))) == []


@each(SAME_EVERYWHERE)
def test_what_is_the_same_everywhere_is_compared(source):
    assert misplaced(cells_of((IMPORTS, source))) == []


@each(NEVER)
def test_a_count_is_never_ignored_and_a_time_never_asserted(source):
    assert misplaced(code_cells(notebook_of(IMPORTS, source)))
