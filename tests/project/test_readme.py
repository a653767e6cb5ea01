"""The README's ten lines run, and its numbers are those that the notebooks print."""

import json
import re
from pathlib import Path

import pytest
import readme_table
import torch
from notebook_cells import code_cells, text_of

from paged_attention import reference_attention

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[\d\d\]\((notebooks/\S+)\) \|(.*)\|$", README, re.MULTILINE)


def example(number):
    """The names that the README's example defines."""
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 4  # the third is in hf.py, and tested with it
    names = {}
    exec(examples[number], names)
    return names


def test_the_ten_lines_run_and_are_right():
    names = example(0)
    cache, query = names["cache"], names["query"]
    args = query, cache.key_cache(), cache.value_cache(), names["tables"], names["lens"]
    expected, _ = reference_attention(*args, layout="HND")
    assert names["out"].shape == (1, 24, 128)
    assert torch.allclose(names["out"].double(), expected, atol=1e-5)


def test_the_example_of_an_own_cache_runs_and_is_right():
    names = example(1)
    tensors = "query", "key_cache", "value_cache", "block_tables", "seq_lens"
    expected, lse = reference_attention(*(names[n] for n in tensors), layout="NHD", scale=0.125)
    assert names["out"].shape == (3, 32, 64)
    assert torch.allclose(names["out"].double(), expected, atol=1e-5)
    assert torch.allclose(names["lse"].double(), lse, atol=1e-5)
    assert names["key_cache"].data_ptr() == names["pool"].data_ptr()


def test_the_plugins_lines_run_without_vllm_and_change_nothing(caplog):
    with caplog.at_level("INFO"):
        example(3)
    assert "paged_attention" in caplog.text


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_the_measured_table_is_what_the_ladders_json_makes(monkeypatch):
    """After a new run: .venv/bin/python tests/tools/readme_table.py <its JSON>"""
    monkeypatch.chdir(ROOT)
    table = readme_table.table("figures/amd-epyc-avx2/ladder.json")
    assert f"\n\n{table}\n\n" in README
    data = json.loads(Path("figures/amd-epyc-avx2/ladder.json").read_text(encoding="utf-8"))
    for entry in data["contexts"]:
        assert f"\n| {entry['context']:,} | " in table
    for words in (data["device"]["name"], f"torch {data['versions']['torch']}", "24 query heads"):
        assert words in table


def test_the_notebooks_rows_are_one_table():
    lines = README.splitlines()
    rows = [i for i, line in enumerate(lines) if line.startswith("| [")]
    assert rows == list(range(rows[0], rows[0] + len(ROWS)))


def test_every_notebook_has_its_row():
    there = sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))
    assert [path.removeprefix("notebooks/") for path, _ in ROWS] == there


@pytest.mark.parametrize("path, row", ROWS)
def test_the_numbers_of_a_row_are_printed_by_its_notebook(path, row):
    printed = " ".join(
        text_of(o["text"])
        for cell in code_cells(ROOT / path)
        if cell.is_claim
        for o in cell.outputs
        if "text" in o
    )
    printed = re.sub(r"(?<=\d),(?=\d{3})", "", printed)
    claimed = row.split("|")[1].replace("at 100,000 tokens", "")
    numbers = [n.replace(",", "") for n in re.findall(r"\d+(?:,\d{3})+", claimed)]
    assert numbers
    assert [n for n in numbers if n not in re.findall(r"\d+", printed)] == []
