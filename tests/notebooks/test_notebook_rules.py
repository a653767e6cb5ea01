"""The rules that the notebooks are held to: what they catch, and what they allow."""

import pytest
from notebook_cells import IGNORED, code_cells, notebook_of
from notebook_kinds import misplaced
from notebook_literals import literal_claims

pytestmark = pytest.mark.quick


LITERALS = {
    "a number": "print(6250)",
    "a number in text": 'print("27 ops")',
    "a number in an f-string": 'print(f"{3}")',
    "a number in an f-string's text": 'print(f"ops: 27 of {model}")',
    "a number beside a computed one": "print(model, 6250)",
    "a constant given a name": "x = 3; print(x)",
    "a constant given two names": "x = 3\ny = x\nprint(y)",
    "a constant unpacked": 'a, b = 3, model\nprint("ops", a)',
    "a constant from a tuple": "a, b = (3, 4)\nprint(a)",
    "an annotated constant": "x: int = 27\nprint(x)",
    "a constant plus nothing": "x = 27\nprint(x + 0)",
    "a constant plus nothing by name": "x = 27\ny = x + 0\nprint(y)",
    "a constant converted": "x = 27.0\nprint(int(x))",
    "a comparison of constants": "x = 27\nprint(x == 27)",
    "arithmetic under a name": "x = 2 * 3125\nprint(x)",
    "arithmetic on constants": "print(2 * 3125)",
    "math on constants": "print(math.ceil(100_000 / 512))",
    "a tautology": 'check("x", 3, "==", 3)',
    "a tautology by name": 'x = 3\ncheck("x", x, "==", 3)',
    "a tautology by keyword": 'check("x", value=3, op="==", bound=3)',
    "a value against itself": 'check("ops", counts.ops, "==", counts.ops)',
    "a constant as text": "print(str(6250))",
    "a constant formatted": 'print("{} ops".format(27))',
    "a constant formatted beside a computed one": 'print("{} of {}".format(27, model))',
    "a constant by percent": 'print("%d ops" % 27)',
    "a constant by percent beside a computed one": 'print("%d of %d" % (27, model))',
    "a constant concatenated": 'print("ops " + str(27))',
    "a constant joined": 'print(" ".join(["ops", str(27)]))',
    "a joined constant beside a computed one": 'print(" ".join([str(model), "27"]))',
    "a constant spread": "print(*[27, 28])",
    "a constant separator": 'print("ops", model, sep=" 27 ")',
    "a constant end": 'print("ops", model, end=" 27")',
    "a constant picked": "print((27, model)[0])",
    "a constant by or": "print(27 or model)",
    "a constant by and": "print(model and 27)",
    "a constant by condition": "print(27 if model else 28)",
    "a constant in a walrus": "print(ops := 27)",
    "a constant's length": 'print(len("four"))',
    "a constant in a tensor": "print(torch.tensor(27).item())",
    "a constant in an array": "print(np.int64(27))",
    "a constant through a lambda": "f = lambda: 27\nprint(f())",
    "a constant through a function": "def count():\n    return 27\nprint(count())",
    "a constant printed by the notebook's own function": "def show(n):\n    print(n)\nshow(27)",
    "a constant in a function's text": 'def show(n):\n    print("27 ops", n)\nshow(model)',
    "a constant from a list": "ops = [27, 28]\nprint(ops[0])",
    "a constant appended": "ops = []\nops.append(27)\nprint(ops[0])",
    "a constant stored": 'd = {}\nd["ops"] = 27\nprint(d["ops"])',
    "a constant under if True": "if True:\n    x = 27\nprint(x)",
    "a constant under with": "with torch.no_grad():\n    x = 27\nprint(x)",
    "a constant in a try": "try:\n    x = 27\nexcept ValueError:\n    pass\nprint(x)",
    "a constant in a loop of one": "for ops in (27,):\n    print(ops, model)",
    "loop variables alone": "for ops in (27, 28):\n    print(ops)",
    "a comprehension of constants": "print([n for n in (27, 28)])",
    "a print in a comprehension": "[print(n) for n in (27, 28)]",
    "a print handed on": "list(map(print, [27]))",
    "a print renamed": "p = print\np(27)",
    "an exec": 'exec("print(27)")',
    "a written constant": 'sys.stdout.write("27 ops")',
    "a displayed constant": "6250",
    "a displayed text": '"27 ops"',
    "a displayed name": "x = 27\nx",
    "a displayed tuple": "27, model",
    "displayed markdown": 'display(Markdown("27 ops"))',
    "a claim in words": 'print("all stages agree")',
    "a verdict in words": 'print("agrees: True")\nprint(model)',
    "a constant of another cell": ("ops = 27", "print(ops)"),
    "a check on a constant of another cell": ("ops = 27", 'check("ops", ops, "==", 27)'),
    "a flag": "print(True)",
}

COMPUTED = {
    "a name from elsewhere": 'print("ops", counts.ops)',
    "a call on constants": "print(blocks_of(100_000, 16))",
    "a formula on names from elsewhere": 'print("blocks", -(-tokens // block_size), "of", 2 * x)',
    "a formula on named inputs": (
        "tokens, block = 100_000, 16\nblocks = -(-tokens // block)\n"
        'print("blocks", blocks, "bytes", tokens * 4)'
    ),
    "a check of a formula": (
        "worst = max(-(-n // 16) * 16 - n for n in range(1, 5000))\n"
        'check("slots wasted", worst, "==", 15)'
    ),
    "an exercise": 'exercise("blocks", blocks, lambda answer: answer == 6250)',
    "a constant of another cell as a label": (
        "tokens, block = 100_000, 16",
        'print("tokens", tokens, "blocks", -(-tokens // block))',
    ),
    "a check with a constant bound": 'check("max|err|", err, "<=", 1e-5)',
    "a check with a number in its label": 'check("ops at 100K", counts.ops, "==", 27)',
    "a shape": "q = torch.zeros(2, 3)\nprint(q.shape, tuple(q.shape))",
    "a diff": "show_diff(naive_loops, batched_gather)",
    "names that hold digits": 'print("fp32", "V2", "H200", "Phase 2", "Q@K^T", counts.gemms)',
    "a width": 'print(f"{name:>12} {counts.ops:8,}", "%-8d" % counts.ops, "{:>8}".format(x.ops))',
    "a line and a header": 'print("stage", "ops")\nprint("-" * 40)\nprint(name, counts.ops)',
    "rows labelled by a loop": "for n in (1_024, 100_000):\n    print(n, ops_at(n))",
    "rows of a table": 'for name, fn in STAGES.items():\n    print(f"{name:16}", count(fn).ops)',
    "a counter": "n = 0\nfor block in table:\n    n += 1\nprint(n)",
    "a list filled by a loop": "rows = []\nfor fn in fns:\n    rows.append(fn())\nprint(rows)",
    "a list filled by a call": "rows = []\nfill(rows)\nprint(rows)",
    "a dict filled by a loop": "d = {}\nfor k in names:\n    d[k] = count(k)\nprint(d)",
    "a flag that an exception sets": (
        "crashed = False\ntry:\n    f()\nexcept RuntimeError:\n    crashed = True\nprint(crashed)"
    ),
    "an exception's name": "try:\n    f()\nexcept Exception as e:\n    print(type(e).__name__)",
    "words that an exception picks": (
        'try:\n    f()\n    print("no error")\nexcept IndexError:\n    print("refused")'
    ),
    "words that a test picks": 'print("equal" if torch.equal(a, b) else "different")',
    "a bool": "print(torch.equal(a, b))",
    "a displayed call": "tuple(out.shape)",
    "a hidden value": "27;",
    "nothing displayed": "None",
    "a silent cell": "tokens, block = 100_000, 16\nq = torch.zeros(24, 256)",
    "a constant passed to a function that doesn't print it": (
        "def show(n):\n    print(count(n).ops)\nshow(27)"
    ),
    "an ignored cell": ("print(27, time.perf_counter())", IGNORED),
    "a docstring and a function": '"""27 ops."""\n\nimport torch\n\n\ndef f():\n    return 27',
    "a seeded generator": "torch.manual_seed(0)\nprint(f(rng))",
}


IMPORTS = """import time, torch, platform
import matplotlib.pyplot as plt
from paged_attention import plots
from paged_attention.counting import count
from paged_attention.cost import predict
from paged_attention.device import PROFILES
from paged_attention.measure import calibrate, measure, profiler_peak_bytes
"""
DIFFERS_BY_MACHINE = {
    "a time": "print(measure(fn).seconds)",
    "a time in text": 'print(f"{measure(fn).seconds * 1e3:.1f} ms")',
    "a time by name": "t = measure(fn).seconds\nprint(t)",
    "a time from a clock": "start = time.perf_counter()\nfn()\nprint(time.perf_counter() - start)",
    "a time from a list": "times = [measure(f).seconds for f in fns]\nprint(min(times))",
    "a time from a loop": "for t in [measure(f).seconds for f in fns]:\n    print(t)",
    "a time from a function": "def took(f):\n    return measure(f).seconds\nprint(took(fn))",
    "a measurement": "print(measure(fn))",
    "a measurement displayed": "m = measure(fn)\nm",
    "a figure from the allocator": "print(torch.cuda.max_memory_allocated())",
    "a figure from the profiler": "print(profiler_peak_bytes(fn))",
    "a prediction for this machine": "print(predict(name, shape, calibrate()).seconds.low)",
    "the same by name": "p = calibrate()\nprint(predict(name, shape, profile=p).seconds.low)",
    "a picture": "plots.ladder(rows)",
    "a picture by pyplot": "plt.plot(xs)",
    "a device's name": "print(torch.cuda.get_device_name())",
    "a device's name by name": (
        'device = "cuda" if torch.cuda.is_available() else "cpu"\nprint(device)'
    ),
    "a version": "print(torch.__version__)",
    "a machine": "print(platform.processor())",
}
SAME_EVERYWHERE = {
    "counts": "c = count(fn)\nprint(c.ops, c.gemms, c.host_reads, c.peak_bytes)",
    "counts of a measurement": "m = measure(fn)\nprint(m.ops)",
    "a prediction from published figures": (
        'band = predict(name, shape, PROFILES["H200"]).seconds\nprint(band.low)'
    ),
    "counts from a list": "rows = [measure(f) for f in fns]\nfor r in rows:\n    print(r.gemms)",
    "a check on memory": 'check("peak", profiler_peak_bytes(fn), "<=", bound)',
    "a shape on a device": (
        'device = "cuda" if torch.cuda.is_available() else "cpu"\n'
        "x = torch.ones(2, device=device)\nprint(x.shape)"
    ),
}


def cells_of(source):
    """One cell, or a tuple: (a cell, its tag) or the cells one after the other."""
    if isinstance(source, str) or source[-1] == IGNORED:
        source = (source,)
    return code_cells(notebook_of(*source))


@pytest.mark.parametrize("source", LITERALS.values(), ids=LITERALS)
def test_a_claim_that_is_a_literal_of_its_cell_is_caught(source):
    assert literal_claims(cells_of(source))


@pytest.mark.parametrize("source", COMPUTED.values(), ids=COMPUTED)
def test_a_claim_that_something_computes_is_allowed(source):
    assert literal_claims(cells_of(source)) == []


@pytest.mark.parametrize("source", DIFFERS_BY_MACHINE.values(), ids=DIFFERS_BY_MACHINE)
def test_what_differs_by_machine_is_ignored_and_never_compared(source):
    assert misplaced(cells_of((IMPORTS, source)))
    assert misplaced(code_cells(notebook_of(IMPORTS, (source, IGNORED)))) == []


@pytest.mark.parametrize("source", SAME_EVERYWHERE.values(), ids=SAME_EVERYWHERE)
def test_what_is_the_same_everywhere_is_compared(source):
    assert misplaced(cells_of((IMPORTS, source))) == []


def test_a_cell_that_only_counts_cannot_be_ignored():
    assert misplaced(code_cells(notebook_of(IMPORTS, ("print(count(fn).ops)", IGNORED))))


@pytest.mark.parametrize(
    "source",
    ['check("faster", measure(fn).seconds, "<", 1.0)', "t = measure(fn).seconds\nassert t < 1"],
)
def test_no_cell_asserts_a_time_not_even_an_ignored_one(source):
    assert misplaced(code_cells(notebook_of(IMPORTS, (source, IGNORED))))
