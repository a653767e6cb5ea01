"""A notebook can be read in its time, and each of its pictures says in words what it shows."""

from __future__ import annotations

import ast
import json

import pytest
from notebook_cells import text_of
from test_notebooks import NOTEBOOKS, in_each_notebook

pytestmark = pytest.mark.quick

MINUTES = 22
LONGER = {"08_final_kernel": 30, "09_one_decode_step": 30}  # they put everything together
TOO_LONG = {  # notebooks that take longer still. Take a name out when its notebook is shortened
    "02_batched_gather",
    "04_gqa_broadcast",
    "05_single_tile",
    "06_fused_phase2",
    "07_grid_even_share",
    "08_final_kernel",
    "09_one_decode_step",
    "10_real_model",
}
WITHOUT_WORDS = TOO_LONG  # and not run again since pictures have words


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def minutes(cells):
    """Words / 200 + lines of code / 10 + lines of output / 20; an import is one line."""
    words = code = printed = 0
    for cell in cells:
        text = text_of(cell["source"])
        if cell["cell_type"] == "markdown":
            words += len(text.split())
            continue
        if text.startswith("# Installs the package"):  # the first cell, which nobody needs to read
            continue
        code += sum(bool(line.strip()) for line in text.splitlines())
        imports = (s for s in ast.parse(text).body if isinstance(s, ast.ImportFrom))
        code -= sum(s.end_lineno - s.lineno for s in imports)
        printed += sum(len(text_of(o.get("text", "")).splitlines()) for o in cell["outputs"])
    return words / 200 + code / 10 + printed / 20


def pictures(cells):
    """(data, metadata) of each picture that a cell shows."""
    outputs = [o for cell in cells for o in cell.get("outputs", ())]
    return [(o["data"], o["metadata"]) for o in outputs if "image/png" in o.get("data", {})]


def silent(cells):
    """Pictures without words, or without the size that makes them sharp."""
    found = [metadata.get("image/png", {}) for _, metadata in pictures(cells)]
    return [m for m in found if len(m.get("alt", "").split()) < 5 or "width" not in m]


@in_each_notebook
def test_it_can_be_read_in_its_time(path):
    too_long = minutes(cells_of(path)) > LONGER.get(path.stem, MINUTES)
    assert too_long == (path.stem in TOO_LONG)


@in_each_notebook
def test_each_picture_says_in_words_what_it_shows(path):
    assert pictures(cells_of(path))
    assert bool(silent(cells_of(path))) == (path.stem in WITHOUT_WORDS)


def test_the_lists_name_notebooks():
    assert TOO_LONG | LONGER.keys() <= {path.stem for path in NOTEBOOKS}


def test_minutes_are_words_code_and_output():
    text = {"cell_type": "markdown", "source": ["word " * 150 + "\n", "word " * 50]}
    code = {"cell_type": "code", "source": "x = 1\n\n\n" * 10, "outputs": [{"text": "y\n" * 20}]}
    assert minutes([text, code]) == 3.0


def test_a_picture_without_words_or_size_is_noticed():
    def shown(**metadata):
        return [{"outputs": [{"data": {"image/png": ""}, "metadata": {"image/png": metadata}}]}]

    assert not silent(shown(alt="Two bars, the second longer", width=800))
    assert silent(shown(alt="Two bars", width=800)) and silent(shown(width=800))
    assert silent(shown(alt="Two bars, the second longer"))
