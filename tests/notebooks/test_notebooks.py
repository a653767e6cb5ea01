"""The notebooks as files: hygiene, and stage cells that equal the stages. nbval runs them apart.

What a cell may print is tested on small examples in test_notebook_rules.py.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from notebook_cells import IGNORED, LESSON, PRINTERS, called, code_cells, notebook_of, text_of
from notebook_kinds import misplaced
from notebook_literals import literal_claims

from paged_attention.stages import STAGES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
in_each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)

PATHS = re.compile(r"(?<![\w.:/])/(home|root|Users|tmp|usr|opt|mnt|var|work)/|\b[A-Z]:\\\\?\w")
# nbval obeys these in comments too, where no reader of tags would see them
MARKERS = re.compile(r"^\s*#+\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$", re.MULTILINE)


def stage_of(path: Path) -> str | None:
    """01_naive_loops teaches naive_loops; a notebook whose name is no stage's teaches none."""
    name = re.sub(r"^\d+_", "", path.stem)
    return name if name in STAGES else None


def stage_text(name: str) -> str:
    return (ROOT / "paged_attention" / "stages" / f"{name}.py").read_text(encoding="utf-8")


# -- the rules


def run_order_faults(cells):
    """Cells ran once each from top to bottom."""
    ran = [c.execution_count for c in cells]
    empty = [f"cell {c.number} is empty" for c in cells if not c.source.strip()]
    return empty + ([] if ran == list(range(1, len(ran) + 1)) else [f"ran in the order {ran}"])


def tag_faults(cells):
    """The only tag is the one that ignores an output."""
    markers = [(c, m.group(1)) for c in cells for m in MARKERS.finditer(c.source)]
    tags = [(c, tag) for c in cells for tag in c.tags if tag != IGNORED]
    return [f"cell {c.number} is marked {mark}" for c, mark in tags + markers]


def output_faults(cells):
    """Outputs are stored, without errors, warnings or pictures that nbval should compare."""
    faults = []
    for cell in cells:
        defined = [s for s in cell.tree.body if not isinstance(s, ast.FunctionDef)]
        nodes = [n for s in defined for n in ast.walk(s)]
        says = any(called(n) in PRINTERS | LESSON for n in nodes)
        if (says or cell.is_ignored) and not cell.outputs:
            faults.append(f"cell {cell.number} has no stored output")
        for o in cell.outputs:
            kinds = " ".join(o.get("data", {}))
            if o["output_type"] == "error" or o.get("name") == "stderr":
                faults.append(f"cell {cell.number} ended in an error or a warning")
            if "svg" in kinds or (not cell.is_ignored and re.search("image/|application/", kinds)):
                faults.append(f"cell {cell.number} holds a picture with a timestamp, or compared")
    return faults


def path_faults(cells):
    """No path of a machine."""
    texts = []
    for c in cells:
        texts.append(c.source)
        for o in c.outputs:
            texts += [text_of(o.get("text", "")), *o.get("traceback", ())]
            texts += [text_of(v) for k, v in o.get("data", {}).items() if k.startswith("text/")]
    return [m.group() for text in texts for m in PATHS.finditer(text)]


def claim_faults(cells):
    return [] if sum(c.is_claim for c in cells) >= 3 else ["it claims less than three things"]


def names_of(n):
    """The names that a node imports, looks up, defines or binds."""
    if isinstance(n, ast.ImportFrom) and "paged_attention" in (n.module or ""):
        return {a.name for a in n.names} | set(n.module.split("."))
    if isinstance(n, ast.Import):
        return {part for a in n.names for part in a.name.split(".")}
    if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant):
        return {n.slice.value} if "STAGES" in ast.unparse(n.value) else set()
    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
        return {n.id}
    is_named = isinstance(n, (ast.Attribute, ast.FunctionDef))
    return {getattr(n, "attr", None) or n.name} if is_named else set()


def stage_faults(cells, name: str, text: str):
    """The notebook has the stage's whole file as one cell, and uses no other copy of it."""
    equal = [c.number for c in cells if c.source == text.rstrip("\n")]
    faults = [] if len(equal) == 1 else [f"cells equal to stages/{name}.py: {equal}"]
    return faults + [
        f"cell {cell.number} has a {name} from elsewhere than its own cell"
        for cell in cells
        if cell.number not in equal and any(name in names_of(n) for n in ast.walk(cell.tree))
    ]


RULES = [run_order_faults, tag_faults, output_faults, path_faults, claim_faults]
RULES += [literal_claims, misplaced]


# -- held by every notebook


def test_there_are_notebooks_and_they_are_numbered_from_zero():
    numbers = [int(p.stem[:2]) for p in NOTEBOOKS]
    assert numbers and numbers == list(range(len(numbers)))


@in_each_notebook
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_it_keeps_the_rules(path, rule):
    assert rule(code_cells(path)) == []


@in_each_notebook
def test_it_is_small_and_its_text_names_no_path_of_a_machine(path):
    assert path.stat().st_size < 1_000_000
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [c for c in cells if PATHS.search(text_of(c["source"]))] == []


@pytest.mark.parametrize("path", [*filter(stage_of, NOTEBOOKS)], ids=lambda p: p.stem)
def test_the_stage_in_a_notebook_is_the_whole_file_of_the_stage(path):
    name = stage_of(path)
    assert stage_faults(code_cells(path), name, stage_text(name)) == []


# -- the rules themselves


def output(kind="stream", **fields):
    return {"outputs": [{"output_type": kind, **fields}]}


BROKEN = {  # what is changed of a sound cell, and the rule that must notice
    "not run": (run_order_faults, {"execution_count": None}),
    "run again": (run_order_faults, {"execution_count": 2}),
    "empty": (run_order_faults, {"source": ["  \n"]}),
    "a tag": (tag_faults, {"metadata": {"tags": ["nbval-skip"]}}),
    "another tag": (tag_faults, {"metadata": {"tags": ["raises-exception"]}}),
    "a marker": (tag_faults, {"source": ["  ## NBVAL_SKIP \n", "print(x)"]}),
    "another marker": (tag_faults, {"source": ["# NBVAL_IGNORE_OUTPUT\n", "print(x)"]}),
    "no output": (output_faults, {"outputs": []}),
    "an error": (output_faults, output("error", ename="E", evalue="", traceback=[])),
    "a warning": (output_faults, output(name="stderr", text=["a warning\n"])),
    "a picture": (output_faults, output("display_data", data={"image/png": "", "text/plain": ""})),
    "svg": (output_faults, output("display_data", data={"image/svg+xml": "<svg/>"})),
    "a path": (path_faults, {"source": ["open('/ho" + "me/me/a.py')"]}),
    "a path printed": (path_faults, output(text=["at /tm" + "p/ipykernel_1/a.py\n"])),
}


def sound():
    notebook = notebook_of("print(f(x))", ("print(time.time())", IGNORED), "x = f()")
    notebook["cells"][2]["outputs"] = []
    return notebook


def test_a_sound_notebook_has_no_faults():
    assert [f for rule in RULES[:4] for f in rule(code_cells(sound()))] == []


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_a_rule_is_caught(what):
    (rule, change), notebook = BROKEN[what], sound()
    notebook["cells"][0].update(change)
    assert rule(code_cells(notebook))


STAGE = '"""A stage."""\n\n\ndef my_stage():\n    return 1\n'
WHOLE = STAGE.strip()


def test_a_stage_cell_that_equals_its_file_is_accepted():
    cells = code_cells(notebook_of(WHOLE, "print(my_stage())"))
    assert stage_faults(cells, "my_stage", STAGE) == []


@pytest.mark.parametrize(
    "cells",
    [
        ["print(1)"],
        [WHOLE.replace("1", "2")],
        [WHOLE.replace('"""A stage."""\n\n\n', "")],
        [WHOLE, WHOLE],
        [WHOLE, "from paged_attention.stages import my_stage"],
        [WHOLE, "import paged_attention.stages.my_stage as s"],
        [WHOLE, "out = stages.my_stage()"],
        [WHOLE, 'out = STAGES["my_stage"]()'],
        [WHOLE, "my_stage = other"],
        [WHOLE, "def my_stage():\n    return 1"],
    ],
    ids=lambda cells: cells[-1].splitlines()[-1].strip(),
)
def test_a_stage_that_is_missing_changed_or_taken_from_elsewhere_is_caught(cells):
    assert stage_faults(code_cells(notebook_of(*cells)), "my_stage", STAGE)


@in_each_notebook
def test_the_set_up_imports_from_eight_of_our_modules_at_most(path):
    nodes = [[*ast.walk(cell.tree)] for cell in code_cells(path)]
    names = [[n.module for n in cell if isinstance(n, ast.ImportFrom)] for cell in nodes]
    ours = [[m for m in cell if m.partition(".")[0] == "paged_attention"] for cell in names]
    first = next(cell for cell in ours if cell)
    assert len(first) <= 8
