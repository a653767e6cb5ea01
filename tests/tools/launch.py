"""Write each notebook's first cell, and the badges that open it elsewhere.

.venv/bin/python tests/tools/launch.py

The address is `project.urls.Repository` in pyproject.toml, and stands nowhere else. While it isn't
set, there are no badges, and the first cell installs from the checkout around it.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BRANCH = "main"
COLAB = "https://colab.research.google.com"
BINDER = "https://mybinder.org"

INSTALLED = 'find_spec("paged_attention") is None'
FROM_CHECKOUT = f"""\
# Installs the package from this checkout where it is missing. Otherwise nothing happens.
import subprocess
import sys
from importlib.util import find_spec

if {INSTALLED}:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", ".."], check=True)
"""
FROM_ANYWHERE = f"""\
# Fetches the repository where this notebook is alone, as on Colab, and installs the package where
# it is missing. Otherwise nothing happens.
import os
import subprocess
import sys
from importlib.util import find_spec

if not os.path.isdir("data"):
    if not os.path.isdir("repository"):
        url = "{{url}}"
        subprocess.run(["git", "clone", "-q", "--depth=1", url, "repository"], check=True)
    os.chdir("repository/notebooks")
if {INSTALLED}:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", ".."], check=True)
"""


def repository(pyproject: str) -> str | None:
    """Where the project lies on GitHub, from pyproject.toml's text; None if it doesn't say.

    Raises:  ValueError: it lies elsewhere, and Colab opens notebooks of GitHub only
    """
    import tomllib  # comes with Python 3.11

    url = tomllib.loads(pyproject)["project"].get("urls", {}).get("Repository")
    if url is None:
        return None
    match = re.fullmatch(r"(https://github\.com/[\w.-]+/[\w.-]+?)(?:\.git)?/?", url)
    if not match:
        raise ValueError(f"Repository must be https://github.com/owner/name, and is {url}")
    return match[1]


def first_cell(url: str | None) -> str:
    return (FROM_ANYWHERE.format(url=url) if url else FROM_CHECKOUT).rstrip()


def badges(url: str, name: str) -> str:
    """Links that open a notebook on Colab and on Binder."""
    owner = url.removeprefix("https://github.com/")
    colab = f"{COLAB}/github/{owner}/blob/{BRANCH}/notebooks/{name}"
    binder = f"{BINDER}/v2/gh/{owner}/{BRANCH}?urlpath=lab/tree/notebooks/{name}"
    return (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder]({BINDER}/badge_logo.svg)]({binder})"
    )


BADGES = re.compile(r" ?\[!\[Open in (?:Colab|Binder)\]\([^)]*\)\]\([^)]*\)")


def notebook_with(notebook: dict, name: str, url: str | None) -> dict:
    """A notebook's JSON with its first cell and its badges, in place of those that it had."""
    notebook = copy.deepcopy(notebook)
    title = next(cell for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    text = re.sub(rf"^(?:{BADGES.pattern})+\n\n?", "", _text(title), flags=re.MULTILINE)
    heading, _, rest = text.partition("\n\n")
    title["source"] = _lines("\n\n".join([heading, *([badges(url, name)] if url else []), rest]))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if INSTALLED not in _text(code[0]):
        for cell in code:
            _count_one_up(cell)
        new = copy.deepcopy(code[0]) | {"metadata": {}, "outputs": [], "execution_count": 1}
        if "id" in new:
            new["id"] = "first-cell"
        notebook["cells"].insert(notebook["cells"].index(title) + 1, new)
        code = [new]
    code[0]["source"] = _lines(first_cell(url))
    return notebook


def readme_with(readme: str, url: str | None) -> str:
    """The README with the badges as the last column of its table of notebooks, or without it."""
    lines = []
    for line in BADGES.sub("", readme).split("\n"):
        row = re.match(r"\| \[\d\d\]\(notebooks/([^)]*)\) \|", line)
        in_table = row or re.match(r"\| \| question \| result \|", line)
        if in_table or (lines and lines[-1].startswith("| | question") and line.startswith("|--")):
            line = "|".join(line.split("|")[:4]) + "|"
            cell = (
                f" {badges(url, row[1])} |"
                if url and row
                else " open in |"
                if in_table
                else "---|"
            )
            line += cell if url else ""
        lines.append(line)
    return "\n".join(lines)


def _text(cell: dict) -> str:
    return "".join(cell["source"])


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _count_one_up(cell: dict) -> None:
    for counted in (cell, *cell["outputs"]):
        if counted.get("execution_count") is not None:
            counted["execution_count"] += 1


def main() -> int:
    url = repository((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        old = path.read_text(encoding="utf-8")
        new = json.dumps(
            notebook_with(json.loads(old), path.name, url), indent=1, ensure_ascii=False
        )
        if new + "\n" != old:
            path.write_text(new + "\n", encoding="utf-8")
            print("written:", path.name)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(readme_with(text, url), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
