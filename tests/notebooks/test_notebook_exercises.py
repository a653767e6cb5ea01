"""The exercises' own solutions are right, and a wrong answer is told so.

A solution is the python block under an exercise, in a `<details>`. In a copy of the notebook it
takes the place of the reader's stub, the statement that binds the same name.
"""

import ast
import re

import pytest
from nbval_runs import load, run_nbval, with_cells
from notebook_cells import called, text_of
from test_notebooks import in_each_notebook

from paged_attention.lesson import exercise

pytestmark = pytest.mark.slow

SOLUTION = re.compile(r"<details><summary>Solution.*?```python\n(.*?)```", re.DOTALL)


def bound_by(statement):
    """The name that a `def` or an assignment binds."""
    if isinstance(statement, ast.Assign):
        return statement.targets[0].id
    return getattr(statement, "name", None)


def solutions(notebook) -> dict:
    """{name: source} of every solution in the notebook's text."""
    prose = "\n".join(
        text_of(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"
    )
    found = SOLUTION.findall(prose)
    return {bound_by(ast.parse(source).body[-1]): source.rstrip() for source in found}


def solved(source: str, answers: dict) -> str | None:
    """An exercise's cell with the stub replaced; None for any other cell."""
    tree = ast.parse(source)
    if not any(called(n) == "exercise" for n in ast.walk(tree)):
        return None
    stub = tree.body[0]
    lines = source.splitlines()
    rest = lines[stub.end_lineno :]
    return "\n".join([answers[bound_by(stub)], *rest])


@in_each_notebook
def test_the_solutions_pass_the_notebooks_own_checks(path, tmp_path):
    notebook = load(path)
    answers = solutions(notebook)
    assert answers, "a notebook has exercises"
    record = run_nbval(
        tmp_path, with_cells(notebook, lambda source: solved(source, answers)), path.stem
    )
    verdicts = [
        text_of(o["text"]).strip()
        for r in record
        for o in r["outputs"]
        if o["output_type"] == "stream" and text_of(o["text"]).endswith((": right\n", "yet\n"))
    ]
    assert verdicts == [f"{name}: right" for name in answers]
    assert [r["why"] for r in record if r["outcome"] != "passed"] == (
        ["Cell outputs differ"] * len(answers)
    )


def test_an_exercise_not_tried_says_so_and_a_wrong_answer_is_an_error(capsys):
    exercise("sum", None, lambda answer: answer == 4)
    assert capsys.readouterr().out == "sum: not tried yet\n"
    exercise("sum", 4, lambda answer: answer == 4)
    assert capsys.readouterr().out == "sum: right\n"
    with pytest.raises(AssertionError, match="sum: 5 is not right"):
        exercise("sum", 5, lambda answer: answer == 4)
