"""Running nbval over a changed copy of a notebook. Used by the mutation and exercise tests."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

from notebook_cells import text_of

ROOT = Path(__file__).parents[2]
RECORDER = """
import json
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when == "call" or report.failed:
        with open("record.jsonl", "a") as f:
            json.dump({
                "notebook": item.path.stem,
                "cell": item.cell_num + 1,
                "outcome": report.outcome,
                "why": str(call.excinfo.value) if call.excinfo else "",
                "outputs": item.test_outputs,
            }, f)
            f.write("\\n")
"""


def run_nbval(folder: Path, notebook: dict, name: str, *options) -> list[dict]:
    """Strict nbval over one notebook, in a folder of its own: what became of each cell."""
    (folder / "notebooks").mkdir(parents=True)
    for read in ("notebooks/data", "figures"):
        (folder / read).symlink_to(ROOT / read)
    (folder / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    (folder / "conftest.py").write_text(RECORDER)
    (folder / "pytest.ini").write_text("[pytest]\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--nbval", "--nbval-current-env", *options, "notebooks"]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    record = folder / "record.jsonl"
    assert record.exists(), done.stdout + done.stderr
    return [json.loads(line) for line in record.read_text().splitlines()]


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def with_cells(notebook: dict, change) -> dict:
    """`change` is given each code cell's source and returns what it shall be, or None."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = change(text_of(cell["source"]))
            if source is not None:
                cell["source"] = source
                if not source:
                    cell["outputs"] = []
    return notebook
