"""What surrounds the package: packaging, the Makefile, layering, and what no file may hold."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paged_attention"

# Each room of the package, and the rooms below it, which are all that it may import.
KERNEL = {"kernel"}
DATA = KERNEL | {"cache", "reference", "inputs", "stages"}
ROOMS = {
    "kernel": set(),
    "cache": KERNEL,
    "reference": KERNEL,
    "inputs": KERNEL,
    "stages": set(),
    "measure": DATA,
    "cost": DATA | {"measure"},
    "plots": DATA | {"measure", "cost"},
    "lesson": set(),
    "hf": DATA,
    "vllm": DATA,
    "bench": DATA | {"measure", "cost", "plots"},
    "__init__": {"kernel", "cache", "reference"},
    "__main__": {"bench"},
}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def toml(name):
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    return tomllib.loads(read(name))


def tracked_files():
    """What git tracks, or would if it were added."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git clone")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def modules():
    return sorted(PACKAGE.rglob("*.py"))


# -- packaging --


def test_the_dependencies_are_torch_and_numpy_alone():
    project = toml("pyproject.toml")["project"]
    assert project["dependencies"] == ["torch>=2.1", "numpy"]
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "Apache-2.0"


def test_the_version_is_one():
    version = toml("pyproject.toml")["project"]["version"]
    latest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE).group(1)
    in_code = re.search(
        r'^__version__ = "(.*)"$', read("paged_attention/__init__.py"), re.MULTILINE
    )
    assert version == latest == in_code.group(1)


def test_conda_gets_what_pip_gets():
    project = toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["notebooks"], *extras["dev"]]
    wanted.append(f"python{project['requires-python']}")

    environment = yaml.safe_load(read("environment.yml"))
    listed = [d for d in environment["dependencies"] if isinstance(d, str) and d != "pip"]
    assert sorted(listed) == sorted(re.sub(r"^torch\b", "pytorch", w) for w in wanted)
    [by_pip] = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert by_pip == ["-e .[notebooks,dev]"]
    assert environment["channels"][0] == "conda-forge"


def test_the_makefiles_versions_fulfil_the_projects_bounds():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    project = toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    for wanted in [*project["dependencies"], *(w for extra in extras.values() for w in extra)]:
        name, _, least = wanted.partition(">=")
        assert numbers(pinned[name]) >= numbers(least or "0"), wanted
    assert pinned["torch"] == "2.13.0"


def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version)]


def test_badges_lead_to_the_projects_own_addresses_or_are_absent():
    """A badge is a picture behind a link; without project.urls there is nowhere to link to."""
    urls = toml("pyproject.toml")["project"].get("urls", {}).values()
    texts = [read("README.md"), *(p.read_text() for p in (ROOT / "notebooks").glob("*.ipynb"))]
    for target in re.findall(r"\[!\[[^]]*\]\([^)]*\)\]\(([^)]*)\)", "\n".join(texts)):
        assert any(url.split("//")[-1] in target for url in urls), target


# -- the Makefile --


def make(*arguments):
    outer = ("MAKE", "MFLAGS", "PYTEST", "PYTHON", "VENV")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )


def lines_of(done):
    """What was said, less make's own word that it failed."""
    return [line for line in (done.stdout + done.stderr).splitlines() if "***" not in line]


def stub(folder, text):
    path = folder / "stub-python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_ci_runs_make_test_and_nothing_else():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    commands = [line for line in read(".ci/run").splitlines() if line and line[0] != "#"]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


def test_make_test_runs_every_test_and_every_notebook():
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)[1]
    [command] = [line for line in recipe.splitlines() if "pytest -" in line]
    assert command.endswith("--nbval --nbval-current-env tests notebooks")
    everything = command + read("pyproject.toml") + read("tests/conftest.py")
    for dodge in ("-k ", "-m ", "--ignore", "--deselect", "--nbval-lax", "collect_ignore", "-x "):
        assert dodge not in everything.replace("$(PY) -m pytest", ""), dodge


@pytest.mark.parametrize("target", ["run", "test"])
def test_without_a_venv_one_line_says_which_module_is_missing(target, tmp_path):
    without_torch = stub(tmp_path, f'exec "{sys.executable}" -S "$@"')
    done = make(target, "VENV=none", f"PYTHON={without_torch}")
    assert done.returncode != 0
    [line] = lines_of(done)
    assert line.startswith(f"{without_torch} has no module named torch, numpy")


def test_with_every_module_there_nothing_is_said_and_nothing_installed(tmp_path):
    done = make("-n", "run", "VENV=none", f"PYTHON={sys.executable}")
    assert done.returncode == 0
    assert "pip install" not in done.stdout and "-m venv" not in done.stdout


@pytest.mark.parametrize("target, old", [("run", (3, 10)), ("test", (3, 9)), ("lab", (3, 10))])
def test_making_the_venv_asks_for_python_3_11(target, old, tmp_path):
    major, minor = old
    fake = f"sys.version_info = namedtuple('v', 'major minor')({major}, {minor})"
    program = f"import sys; from collections import namedtuple; {fake}; $2"
    old_python = stub(tmp_path, f'exec "{sys.executable}" -c "{program}"')
    done = make(target, f"PYTHON={old_python}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0 and not (tmp_path / "venv").exists()
    [line] = lines_of(done)
    assert "needs Python 3.11 or newer" in line and f"is {major}.{minor}" in line


def test_an_interrupted_installation_goes_on_at_the_next_make(tmp_path):
    """A venv without a working pip is made again; only a whole installation leaves a stamp."""
    log = tmp_path / "log"
    python = stub(
        tmp_path, f'echo "$@" >> "{log}"; [ "$1" != -m ] || [ "$2" != venv ] || exit 130'
    )
    for _ in range(2):
        assert make("run", f"PYTHON={python}", f"VENV={tmp_path}/venv").returncode != 0
    assert log.read_text().count("-m venv --clear") == 2


def test_a_venv_is_not_made_over_another_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    done = make("run", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert done.returncode != 0 and "no virtual environment" in done.stdout + done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert "VENV is empty" in make("run", "VENV=").stderr


@pytest.mark.parametrize(
    "target, words",
    [
        ("run", "-m paged_attention"),
        ("test-model", "-m pytest tests/tools/whole_model.py"),
        ("lab", "-m jupyterlab notebooks"),
        ("notebooks", "nbconvert --to notebook --execute --inplace"),
        ("figures", "-m paged_attention.bench.figures figures"),
        ("lint", "ruff format --check ."),
        ("lint", "ruff check ."),
        ("test", "ruff format --check ."),
        ("fuzz", "HYPOTHESIS_PROFILE=fuzz"),
        ("accuracy", "tests/tools/accuracy.py"),
    ],
)
def test_a_target_runs_what_it_says(target, words):
    assert words in make("-n", target, "VENV=none", f"PYTHON={sys.executable}").stdout


def test_the_oldest_torch_comes_with_numpy_1():
    assert "'torch==2.1.2' 'numpy<2'" in read("Makefile")


def test_help_names_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE).group(1).split()
    said = make("help").stdout
    assert all(f"make {t}" in said for t in targets if t != "help")


# -- the package --


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_python_3_10_can_parse_it(path):
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


def test_it_imports_with_nothing_but_torch_and_numpy():
    optional = ["matplotlib", "tqdm", "IPython", "ipykernel", "nbformat", "transformers", "gguf"]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in modules()]
    names = [
        n.removesuffix(".__init__") for n in names if not n.endswith("__main__") and ".hf" not in n
    ]
    program = f"""
import sys
for name in {optional}:
    sys.modules[name] = None  # importing it raises ImportError
import importlib
for name in {names}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_nothing_of_ours_imports_the_client_of_transformers():
    """The one room that needs more than torch and numpy is there for who asks for it."""
    others = [p for p in modules() if p.parent.name != "hf"]
    assert [p.name for p in others if "hf" in imports_of(p)] == []


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_is_imported_at_once_comes_with_python_or_is_torch_or_numpy(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in tree.body if isinstance(n, ast.ImportFrom) and not n.level}
    known = {"torch", "numpy", "paged_attention", *sys.stdlib_module_names}
    if path.parent.name == "hf":  # a client of transformers, for those who have it
        known.add("transformers")
    assert {n.split(".")[0] for n in names} <= known


def imports_of(path):
    """The package's modules that a file imports: 'phase2', 'stages', ... ('' is the package)."""
    inside = path.relative_to(PACKAGE).parts
    found = set()
    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(n, ast.Import):
            names = [a.name for a in n.names]
        elif isinstance(n, ast.ImportFrom) and n.level:
            base = ["paged_attention", *inside[:-1]][: len(inside) + 1 - n.level]
            stem = ".".join([*base, *([n.module] if n.module else [])])
            names = [f"{stem}.{a.name}" for a in n.names]
        elif isinstance(n, ast.ImportFrom):
            names = [f"{n.module}.{a.name}" for a in n.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "paged_attention":
                found.add((*name.split("."), "")[1])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_itself_and_the_rooms_below_it(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert imports_of(path) - {"__version__"} <= ROOMS[room] | {room}


def test_no_module_imports_one_that_imports_it():
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in modules()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    arrows = {name: modules_of(path) & names.keys() for name, path in names.items()}
    while arrows:  # take away what imports nothing that is left, until nothing is
        free = {name for name, imported in arrows.items() if not imported & arrows.keys() - {name}}
        assert free, f"a circle among {sorted(arrows)}"
        arrows = {name: imported for name, imported in arrows.items() if name not in free}


def modules_of(path):
    """Full names of the package's modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    found |= {
        f"{n.module}.{a.name}"
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module
        for a in n.names
    }
    return {name for name in found if name.startswith("paged_attention.")}


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "stages").glob("[!_]*.py")), ids=lambda p: p.stem
)
def test_a_stage_stands_alone(path):
    assert imports_of(path) == set()
    imported = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import)]
    assert {a.name for n in imported for a in n.names} <= {"torch", "math"}


def test_importing_the_package_loads_the_kernel_the_cache_and_the_judge():
    program = "import sys, paged_attention; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = [name for name in done.stdout.split() if name.startswith("paged_attention.")]
    assert {name.split(".")[1] for name in loaded} == {"kernel", "cache", "reference"}


def code_lines(path):
    """Lines that hold code: no blanks, no comments, no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = set()
    for n in ast.walk(tree):
        if isinstance(n, (ast.expr, ast.stmt, ast.arg, ast.alias)) and not is_docstring(n):
            if isinstance(n, (ast.Constant, ast.JoinedStr)):
                lines.update(range(n.lineno, n.end_lineno + 1))
            lines.update((n.lineno, n.end_lineno))
    return lines - docstring_lines(tree)


def is_docstring(n):
    return isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)


def docstring_lines(tree):
    docs = [n for n in ast.walk(tree) if is_docstring(n)]
    return {line for n in docs for line in range(n.lineno, n.end_lineno + 1)}


def lines_of_rooms(*rooms):
    files = [p for p in modules() if p.relative_to(PACKAGE).parts[0] in rooms or not rooms]
    return sum(len(code_lines(path)) for path in files)


def test_the_kernel_and_the_package_stay_small():
    assert lines_of_rooms("kernel") <= 1200
    assert lines_of_rooms() <= 5000


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_one_idea(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


# -- what no file may hold --

MACHINES = ["home/", "root/", "Users/", "work/", "tmp/ipykernel"]
PRIVATE = re.compile(
    r"(?<![\w.:/*])/(?:" + "|".join(MACHINES) + r")\w*|(?<!\w)(?:\.\./)*sha" + r"red/\w"
)


def test_no_file_names_a_path_of_a_machine():
    found = {}
    for path in tracked_files():
        if path.suffix in {".png", ".npz"} or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = re.sub(r'"image/png": "[^"]*"', "", text)
        if match := PRIVATE.search(text):
            found[path.relative_to(ROOT)] = match.group()
    assert found == {}


@pytest.mark.parametrize(
    "example", ["/ho" + "me/me/x.py", "at /ro" + "ot/x", "sha" + "red/notes.md"]
)
def test_a_path_of_a_machine_would_be_seen(example):
    assert PRIVATE.search(example)


def test_nothing_that_git_should_ignore_is_tracked():
    names = [str(p.relative_to(ROOT)) for p in tracked_files()]
    unwanted = re.compile(r"__pycache__|\.ipynb_checkpoints|\.venv|\.egg-info|\.ruff_cache")
    assert [n for n in names if unwanted.search(n)] == []


def test_the_licence_is_apache_2():
    assert "Apache License" in read("LICENSE") and "Version 2.0, January 2004" in read("LICENSE")
