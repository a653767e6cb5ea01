"""The notebooks as files: hygiene, and stage cells that equal the stages. nbval runs them apart.

What each rule means is tested on small examples in test_notebook_rules.py.
"""

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


in_each_stage_notebook = pytest.mark.parametrize(
    "path", [p for p in NOTEBOOKS if stage_of(p)], ids=lambda p: p.stem
)


def stage_text(name: str) -> str:
    return (ROOT / "paged_attention" / "stages" / f"{name}.py").read_text(encoding="utf-8")


# -- the rules --


def run_order_faults(cells):
    ran = [c.execution_count for c in cells]
    empty = [f"cell {c.number} is empty" for c in cells if not c.source.strip()]
    return empty + ([] if ran == list(range(1, len(ran) + 1)) else [f"ran in the order {ran}"])


def tag_faults(cells):
    unknown = [f"cell {c.number} is tagged {t}" for c in cells for t in c.tags if t != IGNORED]
    return unknown + [
        f"cell {c.number} holds the comment {m.group(1)}"
        for c in cells
        for m in MARKERS.finditer(c.source)
    ]


def output_faults(cells):
    faults = []
    for cell in cells:
        statements = [
            n for s in cell.tree.body if not isinstance(s, ast.FunctionDef) for n in ast.walk(s)
        ]
        says = any(called(n) in PRINTERS | LESSON for n in statements)
        if says and not cell.outputs:
            faults.append(f"cell {cell.number} prints, and has no stored output")
        if cell.is_ignored and not cell.outputs:
            faults.append(f"cell {cell.number} is ignored, and has no output to ignore")
        for o in cell.outputs:
            kinds = set(o.get("data", {}))
            if o["output_type"] == "error":
                faults.append(f"cell {cell.number} ended in {o['ename']}")
            if o.get("name") == "stderr":
                faults.append(f"cell {cell.number} wrote to stderr")
            if "image/svg+xml" in kinds:
                faults.append(f"cell {cell.number} holds an SVG, which carries a timestamp")
            if not cell.is_ignored and any(
                k.startswith(("image/", "application/")) for k in kinds
            ):
                faults.append(f"cell {cell.number} is compared, but nbval compares no pictures")
    return faults


def path_faults(notebook: dict):
    texts = [text_of(c["source"]) for c in notebook["cells"]]
    for c in notebook["cells"]:
        for o in c.get("outputs", ()):
            texts += [text_of(o.get("text", "")), *o.get("traceback", ())]
            texts += [text_of(v) for k, v in o.get("data", {}).items() if k.startswith("text/")]
    return [m.group() for text in texts for m in PATHS.finditer(text)]


def stage_faults(cells, name: str, text: str):
    """The notebook has the stage's whole file as one cell, and uses no other copy of it."""
    equal = [c.number for c in cells if c.source == text.rstrip("\n")]
    faults = [] if len(equal) == 1 else [f"cells equal to stages/{name}.py: {equal}"]
    for cell in cells:
        if cell.number in equal:
            continue
        for n in ast.walk(cell.tree):
            if isinstance(n, ast.ImportFrom) and "paged_attention" in (n.module or ""):
                theirs = {a.name for a in n.names} | set(n.module.split("."))
            elif isinstance(n, ast.Import):
                theirs = {part for a in n.names for part in a.name.split(".")}
            elif isinstance(n, ast.Attribute):
                theirs = {n.attr}
            elif isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant):
                theirs = {n.slice.value} if "STAGES" in ast.unparse(n.value) else set()
            elif isinstance(n, ast.FunctionDef):
                theirs = {n.name}
            elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                theirs = {n.id}
            else:
                continue
            if name in theirs:
                faults.append(f"cell {cell.number} has a {name} from elsewhere than its own cell")
    return faults


# -- held by every notebook --


def test_there_are_notebooks_and_they_are_numbered_from_zero():
    numbers = [int(p.stem[:2]) for p in NOTEBOOKS]
    assert numbers and numbers == list(range(len(numbers)))


@in_each_notebook
def test_cells_ran_once_each_from_top_to_bottom(path):
    assert run_order_faults(code_cells(path)) == []


@in_each_notebook
def test_the_only_tag_is_the_one_that_ignores_an_output(path):
    assert tag_faults(code_cells(path)) == []


@in_each_notebook
def test_outputs_are_stored_without_errors_or_warnings(path):
    assert output_faults(code_cells(path)) == []


@in_each_notebook
def test_it_names_no_path_of_a_machine(path):
    assert path_faults(json.loads(path.read_text(encoding="utf-8"))) == []


@in_each_notebook
def test_it_is_under_a_megabyte(path):
    assert path.stat().st_size < 1_000_000


@in_each_notebook
def test_it_claims_something(path):
    assert sum(c.is_claim for c in code_cells(path)) >= 3


@in_each_notebook
def test_no_claim_is_a_literal_of_its_own_cell(path):
    assert literal_claims(code_cells(path)) == []


@in_each_notebook
def test_a_cell_is_ignored_exactly_if_it_prints_what_differs_by_machine(path):
    assert misplaced(code_cells(path)) == []


@in_each_stage_notebook
def test_the_stage_in_a_notebook_is_the_whole_file_of_the_stage(path):
    name = stage_of(path)
    assert stage_faults(code_cells(path), name, stage_text(name)) == []


# -- the rules themselves --


def broken(**changes):
    """One claim cell, as nbformat has it, with some of it changed."""
    notebook = notebook_of("print(f(x))")
    notebook["cells"][0].update(changes)
    return code_cells(notebook)


def output(kind="stream", **fields):
    return {"outputs": [{"output_type": kind, **fields}]}


def test_a_sound_notebook_has_no_faults():
    notebook = notebook_of("x = f()", ("print(time.time())", IGNORED), "print(x)")
    notebook["cells"][0]["outputs"] = []
    cells = code_cells(notebook)
    faults = run_order_faults(cells) + tag_faults(cells) + output_faults(cells)
    assert faults + path_faults(notebook) == []


@pytest.mark.parametrize("count", [None, 2])
def test_a_cell_not_run_or_run_again_is_caught(count):
    assert run_order_faults(broken(execution_count=count))


def test_an_empty_cell_is_caught():
    assert run_order_faults(broken(source=["  \n"]))


@pytest.mark.parametrize("tag", ["nbval-skip", "raises-exception", "nbval-check-output", "hide"])
def test_an_unknown_tag_is_caught(tag):
    assert tag_faults(broken(metadata={"tags": [tag]}))


@pytest.mark.parametrize("comment", ["# NBVAL_IGNORE_OUTPUT", "  ## NBVAL_SKIP", "#NBVAL_SKIP "])
def test_a_marker_in_a_comment_is_caught(comment):
    assert tag_faults(broken(source=[f"{comment}\n", "print(x)"]))


@pytest.mark.parametrize(
    "fault",
    [
        {"outputs": []},
        output("error", ename="ValueError", evalue="", traceback=[]),
        output(name="stderr", text=["a warning\n"]),
        output("display_data", data={"image/png": "", "text/plain": "<Figure>"}),
        output("display_data", data={"image/svg+xml": "<svg/>"}),
    ],
    ids=["none", "error", "stderr", "picture", "svg"],
)
def test_an_output_that_proves_nothing_is_caught(fault):
    assert output_faults(broken(**fault))


@pytest.mark.parametrize("root", ["home/me", "root/x", "tmp/ipykernel_1", "Users/me"])
def test_a_path_is_caught_in_source_and_output(root):
    path = f"/{root}/a.py"
    assert path_faults(notebook_of(f"open('{path}')"))
    notebook = notebook_of("print(x)")
    notebook["cells"][0]["outputs"][0]["text"] = [f"at {path}\n"]
    assert path_faults(notebook)


STAGE = '"""A stage."""\n\n\ndef my_stage():\n    return 1\n'


def test_a_stage_cell_that_equals_its_file_is_accepted():
    assert (
        stage_faults(
            code_cells(notebook_of(STAGE.strip(), "print(my_stage())")), "my_stage", STAGE
        )
        == []
    )


@pytest.mark.parametrize(
    "cells",
    [
        ["print(1)"],
        [STAGE.strip().replace("1", "2")],
        [STAGE.strip().replace('"""A stage."""\n\n\n', "")],
        [STAGE.strip(), STAGE.strip()],
        [STAGE.strip(), "from paged_attention.stages import my_stage"],
        [STAGE.strip(), "from paged_attention.stages.my_stage import f"],
        [STAGE.strip(), "import paged_attention.stages.my_stage as s"],
        [STAGE.strip(), "out = stages.my_stage()"],
        [STAGE.strip(), 'out = STAGES["my_stage"]()'],
        [STAGE.strip(), "my_stage = other"],
        [STAGE.strip(), "def my_stage():\n    return 1"],
    ],
    ids=lambda cells: cells[-1].splitlines()[-1].strip(),
)
def test_a_stage_that_is_missing_changed_or_taken_from_elsewhere_is_caught(cells):
    assert stage_faults(code_cells(notebook_of(*cells)), "my_stage", STAGE)
