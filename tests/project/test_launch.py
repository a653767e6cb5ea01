"""A notebook's first cell and its badges: one text, one address, and no dead link without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from notebook_cells import code_cells, notebook_of

pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
URL = "https://github.com/owner/name"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_what_the_tool_writes(path):
    """After a change: .venv/bin/python tests/tools/launch.py"""
    notebook, url = json.loads(path.read_text(encoding="utf-8")), launch.repository(PYPROJECT)
    assert notebook == launch.notebook_with(notebook, path.name, url)
    assert code_cells(notebook)[0].source == launch.first_cell(url)


def test_the_readme_is_what_the_tool_writes():
    assert README == launch.readme_with(README, launch.repository(PYPROJECT))


def test_the_address_is_that_of_pyproject_and_on_github():
    def pyproject(url):
        return f'[project]\nname = "x"\n[project.urls]\nRepository = "{url}"\n'

    assert launch.repository('[project]\nname = "x"') is None
    for spelling in (URL, f"{URL}/", f"{URL}.git"):
        assert launch.repository(pyproject(spelling)) == URL
    with pytest.raises(ValueError, match="gitlab"):
        launch.repository(pyproject("https://gitlab.com/owner/name"))


def a_notebook():
    notebook = notebook_of("import torch", "print(1)")
    title = {"cell_type": "markdown", "source": ["# 00 · A title\n", "\n", "The question"]}
    notebook["cells"].insert(0, title)
    return notebook


def test_badges_and_first_cell_come_and_go_with_the_address():
    without = launch.notebook_with(a_notebook(), "00.ipynb", None)
    assert [cell.execution_count for cell in code_cells(without)] == [1, 2, 3]
    assert code_cells(without)[1].source == "import torch"
    there = launch.notebook_with(without, "00.ipynb", URL)
    assert there["cells"][0]["source"][2:4] == [launch.badges(URL, "00.ipynb") + "\n", "\n"]
    assert "git" not in code_cells(without)[0].source and URL in code_cells(there)[0].source
    again = launch.notebook_with(there, "00.ipynb", "https://github.com/another/name")
    assert "owner" not in json.dumps(again) and json.dumps(again).count("another/name") == 3
    assert launch.notebook_with(again, "00.ipynb", None) == without


def test_the_readmes_table_has_a_column_of_badges_with_an_address_only():
    there = launch.readme_with(README, URL)
    counts = {path.name: there.count(launch.badges(URL, path.name)) for path in NOTEBOOKS}
    assert counts == dict.fromkeys(counts, 1)
    widths = {
        line.count("|") for line in there.splitlines() if "](notebooks/" in line and "| [" in line
    }
    assert widths == {5} and there.count("| open in |") == 1
    assert launch.readme_with(there, URL) == there
    assert "badge" not in launch.readme_with(there, None)


# -- what the cell does

PROGRAM = """
import sys
sys.executable = {pip!r}
exec({cell!r})
exec({cell!r})  # run again, it does nothing more
import os
print(os.path.relpath(os.getcwd(), {start!r}))
"""


def run(cell, folder, pip):
    """Where the kernel stands after the cell ran twice in a Python that lacks the package."""
    program = PROGRAM.format(pip=str(pip), cell=cell, start=str(folder))
    command = [sys.executable, "-S", "-E", "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def pip(tmp_path):
    """A stub for `python -m pip`, which writes down where and how it was called."""
    path = tmp_path / "pip"
    path.write_text(f'#!/bin/sh\necho "$PWD: $@" >> "{tmp_path}/log"\n')
    path.chmod(0o755)
    return path


def test_in_a_checkout_it_installs_that_and_without_dependencies(tmp_path, pip):
    folder = tmp_path / "notebooks"
    (folder / "data").mkdir(parents=True)
    for cell in (launch.first_cell(None), launch.first_cell(URL)):
        assert run(cell, folder, pip) == "."
    calls = (tmp_path / "log").read_text().splitlines()
    assert set(calls) == {f"{folder}: -m pip install -q --no-deps .."}


def test_alone_it_fetches_the_repository_and_works_in_its_notebooks(tmp_path, pip):
    origin, alone = tmp_path / "origin", tmp_path / "alone"
    (origin / "notebooks/data").mkdir(parents=True)
    (origin / "notebooks/data/x.npz").touch()
    alone.mkdir()
    who = ["-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=origin, check=True)
    cell = launch.first_cell(f"file://{origin}")
    assert run(cell, alone, pip) == "repository/notebooks"
    assert run(cell, alone, pip) == "repository/notebooks"  # in a new kernel: no second clone
    assert f"{alone}/repository/notebooks: -m pip install" in (tmp_path / "log").read_text()


def test_where_the_package_is_there_nothing_is_run(tmp_path):
    (tmp_path / "data").mkdir()
    for cell in (launch.first_cell(None), launch.first_cell(URL)):
        program = f"import subprocess\nsubprocess.run = None\nexec({cell!r})"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
