"""Would nbval notice? Each notebook runs again in a copy whose claims, or whose stage, are broken.

The copy with broken claims is also each notebook's second pass: what its cells print, run afresh,
is what the notebook stores.
"""

import ast
import copy
import re

import pytest
import torch
from helpers import oracle, paged, random
from nbval_runs import load, run_nbval, with_cells
from notebook_cells import IGNORED, called, code_cells, notebook_of, text_of
from test_notebooks import NOTEBOOKS, in_each_notebook, stage_of, stage_text

from paged_attention.stages import STAGES

pytestmark = pytest.mark.slow

LAST_TOKEN = ("int(seq_lens[seq])", "max(int(seq_lens[seq]) - 1, 0)")
MAX_OF_PARTITIONS = ("torch.exp(m - global_m)", "torch.exp(global_m - global_m)")
HEADS_IN_Q = (
    "q.view(num_kv_heads, num_queries_per_kv, head_size)",
    "q.view(num_queries_per_kv, num_kv_heads, head_size).transpose(0, 1)",
)


def heads_in_k(tensor, dim, repeats):
    expand = f"{tensor}.float().repeat_interleave(num_queries_per_kv, dim={dim})"
    return expand, f"{tensor}.float().repeat({repeats})"


MUTATIONS = {
    "naive_loops": {
        "the last token dropped": LAST_TOKEN,
        "a head mapped wrongly": heads_in_k("k[tokens]", 1, "1, num_queries_per_kv, 1"),
        "the max forgotten": MAX_OF_PARTITIONS,
    },
    "batched_gather": {
        "the last token dropped": LAST_TOKEN,
        "a head mapped wrongly": heads_in_k("k[:, tokens]", 0, "num_queries_per_kv, 1, 1"),
        "the max forgotten": MAX_OF_PARTITIONS,
    },
    "single_bmm": {
        "the last token dropped": LAST_TOKEN,
        "a head mapped wrongly": heads_in_k("k[:, :seq_len]", 0, "num_queries_per_kv, 1, 1"),
        "the max forgotten": MAX_OF_PARTITIONS,
    },
    "gqa_broadcast": {
        "the last token dropped": LAST_TOKEN,
        "a head mapped wrongly": HEADS_IN_Q,
        "the max forgotten": MAX_OF_PARTITIONS,
    },
    "single_tile": {
        "the last token dropped": LAST_TOKEN,
        "a head mapped wrongly": HEADS_IN_Q,
        "the max forgotten": MAX_OF_PARTITIONS,
    },
    "fused_phase2": {
        "the last token dropped": LAST_TOKEN,
        "a head mapped wrongly": HEADS_IN_Q,
        "the max forgotten": ("m - m.amax(dim=-1, keepdim=True)", "m - m"),
    },
}
in_each_mutation = pytest.mark.parametrize(
    "stage, what", [(s, w) for s in MUTATIONS for w in MUTATIONS[s]]
)


def mutated(stage, what):
    old, new = MUTATIONS[stage][what]
    text = stage_text(stage)
    assert text.count(old) == 1, f"stages/{stage}.py should hold {old!r} once"
    return text.replace(old, new)


# -- breaking a copy --


def said(outputs) -> dict:
    """What nbval compares of a cell's outputs, in the form that it compares it."""
    found = {}
    for o in outputs:
        if o["output_type"] == "stream":
            found[o["name"]] = found.get(o["name"], "") + text_of(o["text"])
        for kind, value in o.get("data", {}).items():
            if kind.startswith("text/"):
                found.setdefault(kind, []).append(text_of(value))
    return found


def corrupt(text: str) -> str:
    """One digit off by one; a letter where there is no digit."""
    changed = re.sub(r"\d", lambda m: str((int(m.group()) + 1) % 10), text, count=1)
    return changed if changed != text else "x" + text


def with_corrupted_claims(notebook: dict, spared=()) -> dict:
    notebook = copy.deepcopy(notebook)
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        if number in spared or IGNORED in cell["metadata"].get("tags", ()):
            continue
        for o in cell["outputs"]:
            if "text" in o:
                o["text"] = corrupt(text_of(o["text"]))
            for kind in o.get("data", {}):
                o["data"][kind] = corrupt(text_of(o["data"][kind]))
    return notebook


def shows_diff(source: str) -> bool:
    return any(called(n) == "show_diff" for n in ast.walk(ast.parse(source)))


# -- every notebook --


@in_each_notebook
def test_nbval_passes_again_and_reports_each_corrupted_claim(path, tmp_path):
    cells = code_cells(path)
    claims = {c.number for c in cells if c.is_claim}
    record = run_nbval(tmp_path, with_corrupted_claims(load(path)), path.stem)
    failed = {r["cell"]: r["why"] for r in record if r["outcome"] != "passed"}
    assert failed == dict.fromkeys(claims, "Cell outputs differ")
    assert len(record) == len(cells)
    second = {r["cell"]: said(r["outputs"]) for r in record if r["cell"] in claims}
    assert second == {c.number: said(c.outputs) for c in cells if c.is_claim}


@pytest.mark.parametrize(
    "path, what",
    [(p, w) for p in NOTEBOOKS if stage_of(p) for w in MUTATIONS[stage_of(p)]],
    ids=lambda x: getattr(x, "stem", x),
)
def test_nbval_fails_where_the_stage_is_broken(path, what, tmp_path):
    stage = stage_of(path)
    text, changed = stage_text(stage).rstrip("\n"), mutated(stage, what).rstrip("\n")
    # A diff would show the mutation itself, and prove nothing about the checks.
    notebook = with_cells(
        load(path),
        lambda source: changed if source == text else "" if shows_diff(source) else None,
    )
    record = run_nbval(tmp_path, notebook, path.stem, "-x")
    [stage_cell] = [c.number for c in code_cells(path) if c.source == text]
    failed = [r["cell"] for r in record if r["outcome"] != "passed"]
    assert failed and failed[0] > stage_cell, "every claim still holds"


# -- the mutations themselves --


def test_every_stage_has_mutations():
    assert list(MUTATIONS) == list(STAGES)


@in_each_mutation
def test_a_mutation_changes_what_the_stage_returns(stage, what):
    dense = random([1, 40, 100], 6, 3, 16, sharp=4.0)
    pool = paged(dense, 8, "vllm")
    right, _ = oracle(dense.query, dense.keys, dense.values, 0.25)
    names = {}
    exec(mutated(stage, what), names)
    assert (STAGES[stage](dense.query, *pool, 0.25, 32) - right).abs().max() < 1e-4
    wrong = names[stage](dense.query, *pool, 0.25, 32)
    assert not torch.allclose(wrong.double(), right, atol=1e-2)


# -- nbval itself, on a small notebook --

SAMPLE = [
    "import time\n\nfrom paged_attention import stages\nfrom paged_attention.lesson import *",
    '"""Adds."""\n\n\ndef add(a, b):\n    return a + b',
    "print(add(2, 3))",
    'check("sum", add(2, 3), "==", 5)',
    "show_diff(add, stages.STAGES['naive_loops'])",
    "add(2, 3), True",
    ("print(time.time())", IGNORED),
]
CLAIMS = {3, 4, 5, 6}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """SAMPLE as executed: what it prints is stored."""
    notebook = notebook_of(*SAMPLE)
    record = run_nbval(tmp_path_factory.mktemp("sample"), notebook, "sample")
    for cell, r in zip(notebook["cells"], record):
        cell["outputs"] = [{"metadata": {}, **o} if "data" in o else o for o in r["outputs"]]
    return notebook


def failures(record):
    return {r["cell"] for r in record if r["outcome"] != "passed"}


def test_nbval_reports_the_claims_that_were_tampered_with_and_no_other(sample, tmp_path):
    assert {c.number for c in code_cells(sample) if c.is_claim} == CLAIMS
    tampered = with_corrupted_claims(sample, spared={5, 6})
    assert failures(run_nbval(tmp_path, tampered, "sample")) == CLAIMS - {5, 6}


def test_nbval_reports_the_claims_that_a_broken_function_changes(sample, tmp_path):
    changed = with_cells(sample, lambda s: s.replace("a + b", "a - b"))
    assert failures(run_nbval(tmp_path, changed, "sample")) == CLAIMS


def test_a_diff_shows_a_notebooks_own_cell_against_a_stage(sample):
    diff = text_of(sample["cells"][4]["outputs"][0]["text"])
    assert '-"""Adds."""' in diff and "-    return a + b" in diff
    assert "+def naive_loops(" in diff and "+import torch" in diff
