"""Every citation is a link that docs/sources.md knows, and everything there is cited."""

from __future__ import annotations

import pytest
from citations import (
    LIST,
    ROOT,
    THREADS,
    Source,
    all_citations,
    citing_files,
    faults_of,
    is_cited,
    places,
    row_of,
    source_of,
    sources_in,
    sources_in_code,
    texts_of,
)

pytestmark = pytest.mark.quick

ROWS = [row for row in map(row_of, LIST.read_text(encoding="utf-8").splitlines()) if row]
PROSE = [path for path in citing_files() if path.suffix != ".py"]


def test_a_source_has_one_row_which_names_its_kind():
    sources = [row.source for row in ROWS]
    assert len(ROWS) > 30 and len(set(sources)) == len(sources)
    assert [row.link for row in ROWS if row.kind != row.source.kind or not row.says] == []


def test_every_citation_has_a_row_of_its_kind():
    """After a new citation: read what it leads to, and write its row in docs/sources.md."""
    missing = {
        f"{name}: {cited.kind} {cited.place} {cited.name}"
        for name, citations in all_citations().items()
        for cited in citations
        if not any(is_cited(row.source, cited) for row in ROWS)
    }
    assert missing == set()


def test_every_row_is_cited_where_it_says():
    """.venv/bin/python tests/tools/sources.py fills the column, and takes out what isn't cited."""
    citations = all_citations()
    found = {row.link: places(row.source, citations) for row in ROWS}
    assert [link for link, where in found.items() if not where] == []
    assert found == {row.link: row.cited_in for row in ROWS}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_citation_in_prose_is_a_link_whose_words_are_true(path):
    assert [fault for text in texts_of(path, ("markdown",)) for fault in faults_of(text)] == []


# -- the rules themselves

GITHUB = "https://github.com/owner/name"


@pytest.mark.parametrize(
    "url, source",
    [
        (f"{GITHUB}/issues/12", Source("issue", "owner/name", "12")),
        (f"{GITHUB}/pull/12/files#r1", Source("pull request", "owner/name", "12")),
        (f"{GITHUB}/commit/{'0123abcd' * 5}", Source("commit", "owner/name", "0123abcd")),
        (f"{GITHUB}/blob/main/a/b.cu", Source("file", "owner/name", "main/a/b.cu")),
        (f"{GITHUB}/tree/{'0123abcd' * 5}/a", Source("folder", "owner/name", "0123abcd/a")),
        (f"{GITHUB}.git", Source("repository", "owner/name", "")),
        ("https://arxiv.org/pdf/2309.06180", Source("paper", "arxiv.org", "2309.06180")),
        ("https://example.org/a/", Source("page", "example.org/a", "")),
    ],
)
def test_a_link_says_what_it_leads_to(url, source):
    assert source_of(url) == source


def test_what_stands_in_code_is_found_too():
    found = sources_in_code('''
"""One line.

    Source:  vLLM attention_kernels.cuh, a_kernel;
             vLLM csrc/cache_kernels.cu
    Example: not_this.py
"""
FIGURE = "owner/name 0123abcd, a worklog; owner/name#12 and https://example.org/page"
''')
    assert found == {
        Source("file", "", "attention_kernels.cuh"),
        Source("file", "", "csrc/cache_kernels.cu"),
        Source("commit", "owner/name", "0123abcd"),
        Source("thread", "owner/name", "12"),
        Source("page", "example.org/page", ""),
    }
    row = Source("pull request", "owner/name", "12")
    assert row.kind in THREADS and is_cited(row, Source("thread", "owner/name", "12"))
    assert not is_cited(row, Source("issue", "owner/name", "12"))
    assert is_cited(
        source_of(f"{GITHUB}/blob/main/csrc/cache_kernels.cu"),
        Source("file", "", "cache_kernels.cu"),
    )
    assert not is_cited(
        source_of(f"{GITHUB}/blob/main/my_kernels.cu"), Source("file", "", "kernels.cu")
    )


def test_an_example_cites_nothing():
    assert sources_in("```\ngit clone https://github.com/owner/name\n```") == set()


@pytest.mark.parametrize(
    "text",
    [
        "(vLLM's 936.)",
        "vLLM 936",
        "FlashInfer's issues 4051 and 4054 are the same",
        "see pull request 7274",
        "as #1745 reports",
        "arXiv:2309.06180",
        "the notes of d9bbef54",
        f"[vLLM's issue 936]({GITHUB}/pull/936)",
        f"[pull request 936]({GITHUB}/pull/937)",
    ],
)
def test_a_vague_citation_is_a_fault(text):
    assert faults_of(text)


@pytest.mark.parametrize(
    "text",
    [
        f"[vLLM's pull request 936]({GITHUB}/pull/936), of 2023",
        f"[d9bbef54]({GITHUB}/commit/d9bbef54) claims it",
        f"[a table of times]({GITHUB}/pull/17)",
        "torch 2.1.0, vLLM 0.6.3, 100,000 tokens, 8192 and 2352, `#12345` and an H200",
        "vLLM above 8,192 tokens [there](#your-devices-numbers)",
        "![](figures/a.png) #not-a-number",
    ],
)
def test_a_clear_one_and_plain_prose_are_none(text):
    assert faults_of(text) == []
