"""OWN-09: whatever happens to the command's pipes and its disk, nothing measured is lost.

Nor does Ctrl-C lose anything. One line says what happened, and the exit status is true.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged_attention.bench import cli, files
from paged_attention.measure.profiles import PROFILES

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--heads 4 --kv-heads 2 --head-size 16 --context 40 --stages single_bmm,single_tile".split()
)
# The command in a process of its own. What it makes of the machine is left out, to save seconds.
COMMAND = f"""
import runpy, sys
from paged_attention.bench import cli
from paged_attention.measure.profiles import PROFILES
cli.calibrate = lambda device: PROFILES["H200"]
sys.argv[1:] = {OPTIONS} + sys.argv[1:]
runpy.run_module("paged_attention", run_name="__main__")
"""


@pytest.fixture(autouse=True)
def heeded_ctrl_c():
    """A shell's background jobs ignore Ctrl-C, and what they start inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(folder, *options, shell="", **environment):
    """The command in this folder. `shell` is what a shell does with its streams, as in 2>&-."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", COMMAND, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def ended(process):
    """(exit status, stdout, stderr)"""
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return process.returncode, out, err


def whole_json(folder):
    data = json.loads((folder / "ladder.json").read_text())
    assert [stage["name"] for stage in data["contexts"][0]["stages"]] == OPTIONS[-1].split(",")
    assert all(stage["samples"] for stage in data["contexts"][0]["stages"])
    return data


def test_a_reader_that_leaves_after_one_line_loses_nothing_own_09(tmp_path):
    process = start(tmp_path)
    assert "torch" in process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(120) == 0
    assert "Traceback" not in err and "Exception ignored" not in err and "BrokenPipe" not in err
    assert whole_json(tmp_path / "figures/local")["interrupted"] is False
    assert (tmp_path / "figures/local/ladder.png").exists()


def test_a_folder_that_a_terminal_cannot_spell_is_spelt_otherwise_own_09(tmp_path):
    process = start(tmp_path, "--out", "größe", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    status, out, _ = ended(process)
    assert status == 0 and "gr\\xf6\\xdfe/ladder.json" in out
    whole_json(tmp_path / "größe")


def test_a_closed_stderr_loses_the_progress_alone_own_09(tmp_path):
    status, out, err = ended(start(tmp_path, shell="2>&-"))
    assert (status, err) == (0, "")
    assert "single_tile  " in out and "filling the cache" not in out
    whole_json(tmp_path / "figures/local")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_below_stdout_loses_the_table_and_says_so_own_09(tmp_path):
    status, out, err = ended(start(tmp_path, shell="> /dev/full"))
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("What was to be printed is lost: [Errno 28]")
    whole_json(tmp_path / "figures/local")


class FullDisk(io.BytesIO):
    """A file that can be opened, and not be written."""

    def __init__(self, dir):
        super().__init__()

    def write(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("out", ["/proc/nowhere", "a" * 300, "full"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_run_own_09(
    out, tmp_path, monkeypatch, capsys
):
    if out == "full":
        monkeypatch.setattr(files.tempfile, "TemporaryFile", FullDisk)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "calibrate", lambda device: pytest.fail("the run began"))
    with pytest.raises(SystemExit) as leave:
        cli.main([*OPTIONS, "--out", out])
    [line] = capsys.readouterr().err.splitlines()
    assert leave.value.code == 2
    assert f"--out {out}: " in line and "it can't be written to: " in line
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_it_loads_shows_no_traceback_own_09(tmp_path):
    """Its torch is one during whose import somebody presses Ctrl-C."""
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def python(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    done = python("-m", "paged_attention", "--context", "40")
    assert done.returncode == 130
    assert done.stderr == "Interrupted before anything was measured.\n"
    imported = python("-c", "import paged_attention")  # a program of one's own keeps Python's ways
    assert "KeyboardInterrupt" in imported.stderr


@pytest.fixture
def a_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "calibrate", lambda device: PROFILES["H200"])

    def run():
        return cli.main([*OPTIONS, "--out", "here"]), *capsys.readouterr()

    return run


def test_ctrl_c_while_drawing_leaves_no_older_picture_and_says_so_own_09(a_run, monkeypatch):
    for name in ("ladder.png", "ladder_lengths.png", "ladder.json"):
        Path("here").mkdir(exist_ok=True)
        Path("here", name).write_bytes(b"of an older run")

    def interrupted(path, run):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "draw", interrupted)
    status, _, err = a_run()
    assert status == 130
    assert err.splitlines()[-1] == (
        "Interrupted: the JSON is whole. "
        "For its pictures: python -m paged_attention.bench.figures here"
    )
    assert [path.name for path in Path("here").iterdir()] == ["ladder.json"]
    whole_json(Path("here"))


def test_ctrl_c_while_the_json_is_written_waits_own_09(a_run, monkeypatch):
    replace = os.replace

    def interrupted(*paths):
        signal.raise_signal(signal.SIGINT)
        replace(*paths)

    monkeypatch.setattr(files.os, "replace", interrupted)
    monkeypatch.setattr(cli, "draw", lambda path, run: [])
    assert a_run()[0] == 0
    whole_json(Path("here"))


def test_a_disk_that_fills_up_during_the_run_keeps_the_older_files_own_09(a_run, monkeypatch):
    Path("here").mkdir()
    for name in ("ladder.png", "ladder.json"):
        Path("here", name).write_bytes(b"of an older run")

    monkeypatch.setattr(Path, "write_bytes", FullDisk.write)
    status, out, err = a_run()
    assert status == 1 and "single_tile  " in out
    assert "--out here: [Errno 28] No space left on device" in err.splitlines()[-1]
    assert {path.read_bytes() for path in Path("here").iterdir()} == {b"of an older run"}
