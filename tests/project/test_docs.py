"""The documents lead somewhere: their links, the names in their backticks, and their numbers."""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import json
import math
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged_attention
from paged_attention.cost import PROFILES
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.shape import StepShape

ROOT = Path(__file__).parents[2]
FOLDERS = "docs", "figures", "notebooks", "paged_attention", "tests"
FILES = [p for f in FOLDERS for p in (ROOT / f).rglob("*") if "__pycache__" not in p.parts]
FILES = sorted(p.relative_to(ROOT) for p in [*FILES, *ROOT.glob("*")] if p.is_file())
DOCS = [p for p in FILES if p.suffix == ".md" or p.suffix == ".ipynb"]
SOURCES = [p for p in FILES if p.suffix == ".py" and p.parts[0] == "paged_attention"]

OTHERS = {"torch", "matplotlib", "vllm", "Axes", "PagedAttention"}
OTHERS |= {"model.generate", "cache.view", "data/chapter_1"}
OF_OTHERS = (".cu", ".cuh", ".gguf")


def prose(path):
    """A document's text without its examples; of a notebook, its markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


# -- links


def anchors(path):
    """What GitHub calls a document's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=str)
def test_every_link_leads_to_a_file_and_to_its_heading(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?://|attachment:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / path.parent / name).resolve() if name else ROOT / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# -- names


@functools.cache
def modules():
    """The package's modules by their names, but for those of an extra that isn't installed."""
    found = {"paged_attention": paged_attention}
    for info in pkgutil.walk_packages(paged_attention.__path__, "paged_attention."):
        if not info.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                found[info.name] = importlib.import_module(info.name)
    return found


def leads_somewhere(name):
    """Whether cost.predict, kernel/plan.py, DecodePlan.run or paged_attention.hf is there."""
    if name in OTHERS or name.split(".")[0] in OTHERS or name.endswith(OF_OTHERS):
        return True
    if any(f"/{path.as_posix()}".endswith(f"/{name}") for path in FILES):
        return True
    first, *rest = name.removeprefix("paged_attention.").split(".")
    starts = [m for full, m in modules().items() if full.split(".")[-1] == first]
    if first[0].isupper():  # a class, wherever it is
        starts += [vars(m)[first] for m in modules().values() if first in vars(m)]
    return any(has(start, rest) for start in starts)


def has(thing, names):
    for name in names:
        if not hasattr(thing, name):  # a dataclass's field without a default is not
            return name in getattr(thing, "__annotations__", {})
        thing = getattr(thing, name)
    return True


@pytest.mark.parametrize("path", DOCS + SOURCES, ids=str)
def test_every_name_in_backticks_leads_somewhere(path):
    names = re.findall(r"`([A-Za-z_][\w/-]*(?:\.\w+)+)(?:\([^`]*\))?`", prose(path))
    assert [name for name in names if not leads_somewhere(name)] == []


@pytest.mark.parametrize(
    "gone", ["report.table", "stream.py", "kernel/plans.py", "cost.predicted", "Workspace.size"]
)
def test_a_name_that_leads_nowhere_would_be_seen(gone):
    assert not leads_somewhere(gone)


def test_every_promise_names_a_test_that_is_there():
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    held_by = re.findall(r"`(\S+\.py)::(test_\w+)`", text)
    assert len(held_by) > 30
    for file, name in held_by:
        texts = [(ROOT / "tests" / file).read_text(encoding="utf-8")]
        if "from field_cases" in texts[0]:  # whose tests it imports
            texts += [p.read_text() for p in (ROOT / "tests/support/field_cases").glob("*.py")]
        assert re.search(rf"^def {name}\(", "\n".join(texts), re.MULTILINE), name


# -- numbers


class Operations(TorchDispatchMode):
    """The name of each operation, and the bytes that it reads and writes."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, alias = func(*args, **(kwargs or {})), func._schema.returns[0].alias_info
        if alias is None or alias.is_write:  # it is no view
            name, output = func._schema.name.removeprefix("aten::"), result
            inputs = [x for x in args if isinstance(x, torch.Tensor)]
            if name in ("copy_", "index_copy_"):  # what was there before is not read
                inputs = inputs[1:]
            if name in ("index_select", "take"):  # what is picked is read
                inputs[0] = output
            if name == "index_copy_":  # what is put there is written
                output = inputs[-1]
            self.rows.append((name, sum(map(num_bytes, inputs)), num_bytes(output)))
        return result


def num_bytes(x):
    sizes = (1 if stride == 0 else size for size, stride in zip(x.shape, x.stride()))
    return math.prod(sizes) * x.element_size()


def tabled(text):
    """The operations that a page's tables list, wave after wave."""
    rows = re.findall(r"^\|.*\| `(\w+)` \|((?: [\d,-]+ \|)+)$", text, re.MULTILINE)
    rows = [(name, cells.replace(",", "").replace("|", "").split()) for name, cells in rows]
    of_waves = [i for i, (_, cells) in enumerate(rows) if len(cells) == 4]
    first, end = of_waves[0], of_waves[-1] + 1
    waves = [(n, cells[at : at + 2]) for at in (0, 2) for n, cells in rows[first:end]]
    rows = [*rows[:first], *waves, *rows[end:]]
    return [(n, int(reads), int(writes)) for n, (reads, writes) in rows if reads != "-"]


def test_reading_the_kernel_says_what_the_kernel_does():
    """Its lines print what stands below them, and its tables list every operation of a run."""
    path = ROOT / "docs/reading_the_kernel.md"
    text = path.read_text(encoding="utf-8")
    lines = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(lines, {}, path.name, str(path), 0)
    assert doctest.DocTestRunner().run(example, clear_globs=False) == (0, len(example.examples))
    run, inputs, out = (example.globs[name] for name in ("run", "inputs", "out"))
    with Operations() as operations:
        run(*inputs, out=out)
    assert tabled(text) == operations.rows
    _, reads, writes = zip(*operations.rows)
    said = f"{len(reads)} operations, which read {sum(reads):,} bytes and write {sum(writes):,}."
    assert said in " ".join(text.split())


def test_performance_says_what_the_ladder_measured():
    text = " ".join((ROOT / "docs/performance.md").read_text(encoding="utf-8").split())
    data = json.loads((ROOT / "figures/amd-epyc-avx2/ladder.json").read_text(encoding="utf-8"))
    rows = [
        {r["name"]: r["seconds"] for r in entry["stages"] + entry["peers"]}
        | {"floor": entry["floor"]["seconds"]}
        for entry in data["contexts"]
    ]
    [at_1024], longer = rows[:1], rows[1:]
    bands = [
        sorted(row[f"paged_attention{layout}"] / row["floor"] for row in longer)
        for layout in ("_HND", "_NHD", "")
    ]
    assert " | ".join(f"{band[0]:.1f} to {band[-1]:.1f}" for band in bands) in text
    against = sorted(row["paged_attention_HND"] / row["vllm_cpu_op"] for row in longer)
    assert f"`HND` takes {against[0]:.2f} to {against[-1]:.2f} times as long" in text
    ratio = at_1024["paged_attention_HND"] / at_1024["vllm_cpu_op"]
    assert f"At 1,024 tokens it takes {ratio:.1f} times as long" in text
    [ragged] = data["batches"]
    first, _, second = (peer["seconds"] for peer in ragged["peers"])
    assert f"{first / second:.2f} times as long on a ragged batch of 16" in text
    assert data["date"].startswith("2026-11-30") and "30 November 2026" in text


@pytest.mark.parametrize("page, partition_size", [("vllm", 512), ("performance", None)])
def test_the_pages_say_what_a_step_takes_on_a_bi_v100(page, partition_size):
    text = " ".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split())
    layout = "vllm" if page == "vllm" else "HND"
    sizes = {"partition_size": partition_size, "wave_budget": PROFILES["BI-V100"].wave_bytes}
    for heads in ((24, 4), (6, 1)):
        shape = StepShape(*heads, 256, 16, torch.float16, 1, None)
        plan = DecodePlan.exact(shape, layout, torch.device("meta"), [100_000], **sizes)
        assert f"{plan.workspace_bytes / 1e6:.0f} MB" in text
