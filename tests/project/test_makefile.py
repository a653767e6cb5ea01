"""The Makefile on a fresh clone: what its targets run, and what they say when a thing is missing.

A stub takes Python's place, so that nothing is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def make(*arguments):
    """(exit status, the lines that make and its commands wrote)"""
    outer = ("MAKE", "MFLAGS", "PYTEST", "PYTHON", "VENV")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode, [line for line in lines if "***" not in line or "VENV" in line]


def stub(folder, text):
    path = folder / "stub-python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_ci_runs_make_test_and_nothing_else():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and line[0] != "#"]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


def test_make_test_runs_every_test_and_every_notebook():
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", MAKEFILE.replace("\\\n", ""), re.M)[1]
    [command] = [line for line in recipe.splitlines() if "pytest -" in line]
    assert command.endswith("--nbval --nbval-current-env tests notebooks")
    settings = (ROOT / "pyproject.toml").read_text() + (ROOT / "tests/conftest.py").read_text()
    everything = command.replace("$(PY) -m pytest", "") + settings
    for dodge in ("-k ", "-m ", "--ignore", "--deselect", "--nbval-lax", "collect_ignore", "-x "):
        assert dodge not in everything, dodge


def test_what_test_oldest_runs_is_there():
    listed = re.search(r"^UNIT_TESTS := ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)[1]
    paths = listed.replace("\\\n", " ").split()
    assert paths and [p for p in paths if not (ROOT / p).exists()] == []
    assert "'torch==2.1.2' 'numpy<2' pytest hypothesis" in MAKEFILE


@pytest.mark.parametrize(
    "target, words",
    [
        ("run", "-m paged_attention"),
        ("device", "tests/tools/device.py\n--out figures/local/device"),
        ("test-model", "-m pytest tests/tools/whole_model.py"),
        ("lab", "-m jupyterlab notebooks"),
        ("notebooks", "nbconvert --to notebook --execute --inplace"),
        ("memory", "tests/tools/notebook_memory.py"),
        ("launch", "tests/tools/launch.py"),
        ("figures", "-m paged_attention.bench.figures figures"),
        ("lint", "ruff format --check .\nruff check .\nbasedpyright"),
        ("test", "ruff format --check .\nruff check .\nbasedpyright"),
        ("fuzz", "HYPOTHESIS_PROFILE=fuzz"),
        ("accuracy", "tests/tools/accuracy.py"),
    ],
)
def test_without_a_venv_a_target_runs_what_it_says_and_installs_nothing(target, words):
    status, lines = make("-n", target, "VENV=none", f"PYTHON={sys.executable}")
    said = "\n".join(lines)
    assert status == 0 and all(word in said for word in words.splitlines())
    assert "pip install" not in said and "-m venv" not in said


def test_the_browser_has_a_venv_of_its_own_beside_the_one_of_the_notebooks():
    status, lines = make("-n", "test-browser", "VENV=none", f"PYTHON={sys.executable}", "-B")
    said = "\n".join(lines)
    assert status == 0 and "tests/tools/browser.py" in said
    installed = [line for line in lines if "pip install" in line]
    assert installed and all(line.startswith(".venv-browser/bin/python") for line in installed)


def test_help_names_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    said = "\n".join(make("help")[1])
    assert [t for t in targets if t != "help" and f"make {t}" not in said] == []


def test_without_a_venv_one_line_says_which_modules_are_missing(tmp_path):
    without_torch = stub(tmp_path, f'exec "{sys.executable}" -S "$@"')
    for target in ("run", "test"):
        status, [line] = make(target, "VENV=none", f"PYTHON={without_torch}")
        assert status and line.startswith(f"{without_torch} has no module named torch, numpy")


def test_making_the_venv_asks_for_python_3_11(tmp_path):
    fake = "sys.version_info = namedtuple('v', 'major minor')(3, 10)"
    program = f"import sys; from collections import namedtuple; {fake}; $2"
    old_python = stub(tmp_path, f'exec "{sys.executable}" -c "{program}"')
    status, [line] = make("run", f"PYTHON={old_python}", f"VENV={tmp_path}/venv")
    assert status and "needs Python 3.11 or newer" in line and "is 3.10" in line
    assert not (tmp_path / "venv").exists()


def test_an_interrupted_installation_goes_on_at_the_next_make(tmp_path):
    """A venv without a working pip is made again, because only a whole one gets a stamp."""
    log = tmp_path / "log"
    python = stub(
        tmp_path, f'echo "$@" >> "{log}"; [ "$1" != -m ] || [ "$2" != venv ] || exit 130'
    )
    for _ in range(2):
        assert make("run", f"PYTHON={python}", f"VENV={tmp_path}/venv")[0]
    assert log.read_text().count("-m venv --clear") == 2


def test_a_venv_is_not_made_over_another_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    status, lines = make("run", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert status and "no virtual environment" in "\n".join(lines)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert "VENV is empty" in "\n".join(make("run", "VENV=")[1])
