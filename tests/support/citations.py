"""What the notebooks, the documents and the package cite: threads, commits, files, pages, papers.

A citation is a link. In the package's code it may be "owner/name#123", "owner/name 0abc1234", or a
file that a docstring names under Source.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs/sources.md"

GITHUB = r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?(?:/(\w+)/([^#?]+))?/?(?:[#?].*)?"
KINDS = {"issues": "issue", "pull": "pull request", "commit": "commit", "blob": "file"}
KINDS |= {"tree": "folder", None: "repository"}
THREADS = ("issue", "pull request")
LINK = re.compile(r"(?<!!)\[([^][]*)\]\((https?://[^)\s]+)\)")
URL = re.compile(r"https?://[^\s)\]>\"'`|]+")
BADGE = re.compile(r"\[!\[[^]]*\]\([^)]*\)\]\([^)]*\)")
OURS = re.search(r'^Repository = "(\S+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
EXAMPLE = re.compile(r"```.*?```|(?<!`)`[^`\n]*`", re.DOTALL)
DOCSTRINGS = re.compile(r"^( *)Source:(.*(?:\n\1  .*)*)", re.MULTILINE)
FILE = re.compile(r"[\w/]+\.(?:cuh|cu|rst|py)\b")
SHORT = re.compile(r"\b([A-Za-z][\w-]*/[\w.-]+)(?:#(\d+)|,? ([0-9a-f]{8,40})\b)")
NUMBERED = re.compile(r"\b(issue|pull request) (\d+)", re.IGNORECASE)

PROJECTS = "vLLM|SGLang|PyTorch|ONNX(?: ?Runtime)?|OpenVINO|FlashInfer|FlashAttention|transformers"
PROJECTS += r"|FlagAttention|llm-foundry|llama(?:\.cpp)?|TileOPs|MinivLLM|FlagTree|CCCL|CUB"
# "vLLM's 936", "issues 3585 and 3586", "#1745", "2316199c" don't say what they lead to.
VAGUE = re.compile(
    rf"\b(?:{PROJECTS})(?:'s)? #?\d{{3,6}}\b(?![.,]\d)"
    r"|\b(?:issues?|pull requests?|PRs?) #?\d{2,6}\b|(?<![\w&/#])#\d{2,6}\b|\barXiv:\d"
    r"|\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,40}\b",
    re.IGNORECASE,
)


class Source(NamedTuple):
    """What a link leads to, whatever its spelling."""

    kind: str
    place: str  # a GitHub repository, or a page's address
    name: str  # of a thread its number, of a commit 8 digits, of a file 8 digits and its path


def source_of(url: str) -> Source:
    url = url.rstrip(".,;")
    if match := re.match(r"https?://arxiv\.org/(?:abs|pdf)/(\d+\.\d+)", url):
        return Source("paper", "arxiv.org", match[1])
    match = re.fullmatch(GITHUB, url)
    if not match or match[2] not in KINDS:
        return Source("page", url.partition("//")[2].rstrip("/"), "")
    place, what, (first, *path) = match[1].lower(), match[2], (match[3] or "").split("/")
    if KINDS[what] in THREADS:
        return Source(KINDS[what], place, first)  # whichever of its pages or comments
    is_hash = re.fullmatch("[0-9a-f]{8,40}", first)
    return Source(KINDS[what], place, "/".join([first[:8] if is_hash else first, *path]))


def texts_of(path: Path, cells: tuple[str, ...] = ("markdown", "code")) -> list[str]:
    """A document's text, the texts of a notebook's cells, a module's text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return [text]
    read = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in read if cell["cell_type"] in cells]


def citing_files() -> list[Path]:
    files = [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    files += [*ROOT.glob("paged_attention/**/*.py"), *ROOT.glob("figures/*.md")]
    return sorted(path for path in files if path != LIST)


def sources_in(text: str) -> set[Source]:
    """What a text's links lead to, but for its examples, its badges and this project's address."""
    urls = URL.findall(EXAMPLE.sub("", BADGE.sub("", text)))
    return {source_of(url) for url in urls if not OURS or url != OURS[1]}


def sources_in_code(text: str) -> set[Source]:
    found, rest = {source_of(url) for url in URL.findall(text)}, URL.sub("", text)
    for place, number, version in SHORT.findall(rest):
        found.add(Source("thread" if number else "commit", place.lower(), number or version[:8]))
    for _, named in DOCSTRINGS.findall(rest):
        found |= {Source("file", "", name) for name in FILE.findall(named)}
    return found


def cited_by(path: Path) -> set[Source]:
    within = sources_in_code if path.suffix == ".py" else sources_in
    return set().union(*map(within, texts_of(path)))


def is_cited(entry: Source, cited: Source) -> bool:
    """Whether a citation means the list's entry. Code may leave out a kind or a repository."""
    if cited.kind == "thread":
        return entry.kind in THREADS and entry[1:] == cited[1:]
    if cited.kind == "file" and not cited.place:
        return entry.kind == "file" and f"/{entry.name}".endswith(f"/{cited.name}")
    return entry == cited


# -- the list


class Row(NamedTuple):
    link: str
    kind: str
    says: str
    cited_in: str

    @property
    def source(self) -> Source:
        return source_of(LINK.fullmatch(self.link)[2])


def row_of(line: str) -> Row | None:
    """A line of docs/sources.md, if it is a row of a table."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return Row(*cells) if len(cells) == 4 and LINK.fullmatch(cells[0]) else None


def short_name(path: Path) -> str:
    """00, for a notebook; vllm.md; kernel/merge.py"""
    path = path.relative_to(ROOT)
    is_code = path.suffix == ".py"
    return (
        path.stem[:2] if path.suffix == ".ipynb" else "/".join(path.parts[1 if is_code else -1 :])
    )


def places(entry: Source, citations: dict[str, set[Source]]) -> str:
    """The files that cite an entry, as its row names them."""
    return ", ".join(
        name for name, cited in citations.items() if any(is_cited(entry, c) for c in cited)
    )


def all_citations() -> dict[str, set[Source]]:
    return {short_name(path): cited_by(path) for path in citing_files()}


def faults_of(text: str) -> list[str]:
    """Citations in prose that are no links, and links whose words name another thread or kind."""
    faults = []
    for words, url in LINK.findall(EXAMPLE.sub("", text)):
        source = source_of(url)
        for kind, number in NUMBERED.findall(words):
            if (kind.lower(), number) != (source.kind, source.name):
                faults.append(f"[{words}] leads to {source.kind} {source.name}")
    rest = EXAMPLE.sub("", LINK.sub("", text))
    return faults + [match.group() for match in VAGUE.finditer(URL.sub("", rest))]
