"""`make device` on a CPU, small; and what is asked of a JSON before it is believed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import device
import figures_readme
import pytest

from paged_attention.bench import check

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "figures"
LADDERS = [p for p in sorted(FIGURES.rglob("ladder.json")) if FIGURES / "local" not in p.parents]
RUN = json.loads((FIGURES / "amd-epyc-avx2/ladder.json").read_text(encoding="utf-8"))
SMALL = "--context 40,70 --heads 4 --kv-heads 2 --head-size 16 --stages single_bmm,single_tile"


def make(*arguments, **environment):
    """make device with the Python at hand, and no compiler for FlexAttention, which takes long."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    env |= {"CXX": "no-compiler", **environment}
    command = ["make", "device", "VENV=none", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_make_device_runs_on_a_cpu_and_a_part_that_fails_spares_the_others(tmp_path):
    tests = "TESTS=tests/kernel/test_partition.py tests/no_such_test.py"
    done = make("DEVICE=cpu", f"OUT={tmp_path}/out", f"ARGS={SMALL}", tests)
    assert done.returncode != 0, done.stdout
    told = json.loads((tmp_path / "out/device.json").read_text())
    assert (told["kind"], told["device"]["type"], told["interrupted"]) == ("device", "cpu", False)
    statuses = {part["name"]: part["status"] for part in told["parts"]}
    assert statuses.pop("tests").startswith("FAILED, exit status")
    assert statuses == {"graph": "fine", "ladder fp32": "fine", "ladder bf16": "fine"}
    graph = told["parts"][1]["figures"]
    assert graph["captured"] is False and graph["max_error"] < 1e-5 and graph["run"] > 0
    summary = (tmp_path / "out/summary.txt").read_text()
    assert str(tmp_path) not in summary + json.dumps(told) and str(ROOT) not in json.dumps(told)
    assert summary in done.stdout
    for name, dtype in (("ladder.json", "float32"), ("bf16/ladder.json", "bfloat16")):
        run = json.loads((tmp_path / "out" / name).read_text())
        assert run["shape"]["dtype"] == dtype and check.problems(run) == []
        assert [step["context"] for step in run["contexts"]] == [40, 70] and run["batches"]
        assert f"{name}: 1 sequence, 4 query heads" in summary
        assert (tmp_path / "out" / name).with_suffix(".png").exists()
    assert "tests: FAILED" in summary and "70 tokens, K and V" in summary
    assert "[4/4] ladder bf16, at most" in done.stderr  # progress


def run_of_parts(monkeypatch, out, result):
    monkeypatch.setattr(device, "result_of", result)
    return device.main(["--device", "cpu", "--out", str(out), "--", "--context", "40"])


def fine(part, log):
    return {"name": part.name, "status": "fine", "seconds": 1.0, "said": "2 passed"}


def test_the_status_is_true(monkeypatch, tmp_path, capsys):
    assert run_of_parts(monkeypatch, tmp_path, fine) == 0
    wrong = {"status": "FAILED, exit status 1"}
    assert run_of_parts(monkeypatch, tmp_path, lambda *part: fine(*part) | wrong) == 1

    def interrupted(part, log):
        if part.name == "ladder fp32":
            raise KeyboardInterrupt
        return fine(part, log)

    assert run_of_parts(monkeypatch, tmp_path, interrupted) == 130
    told = json.loads((tmp_path / "device.json").read_text())
    assert told["interrupted"] and [part["name"] for part in told["parts"]] == ["tests", "graph"]


def test_a_ladder_of_an_older_run_is_not_taken_for_this_ones(monkeypatch, tmp_path, capsys):
    (tmp_path / "ladder.json").write_text(json.dumps(RUN))
    failed = {"status": "FAILED, exit status 1"}
    run_of_parts(monkeypatch, tmp_path, lambda *part: fine(*part) | failed)
    assert json.loads((tmp_path / "device.json").read_text())["ladders"] == []


def test_a_part_that_takes_too_long_is_interrupted_and_says_so(tmp_path):
    program = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('kept')"
    result = device.result_of(device.Part("a part", ["-c", program], 3), tmp_path / "log")
    assert result["status"] == "took longer than 3 s" and result["said"] == "kept"
    assert (tmp_path / "log").read_text() == "kept\n"


def test_all_parts_together_take_less_than_ten_minutes():
    options = device.parsed(["--device", "cpu", "--", "--context", "40"])
    assert sum(part.seconds for part in device.parts_of(options)) < 600


def test_without_hypothesis_the_tests_of_a_device_are_all_there(tmp_path):
    """On a borrowed device nothing can be installed: what draws its inputs skips, and no more."""
    (tmp_path / "run.py").write_text(
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'hypothesis': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "import pytest\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "run.py"), "-q", "-p", "no:cacheprovider"]
    command += ["--collect-only", "-m", "cuda", "tests"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_a_captured_capacity_plan_replays_with_changed_lengths" in done.stdout


# -- what is sent in ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LADDERS, ids=lambda path: str(path.parent.relative_to(FIGURES)))
def test_what_is_committed_can_be_believed(path):
    assert check.problems(json.loads(path.read_text(encoding="utf-8"))) == []


def faster_than_the_floor(run):
    for name in ("seconds", "cold_seconds"):
        run["contexts"][1]["stages"][-1][name] /= 100
    result = run["contexts"][1]["stages"][-1]
    for name in ("spread", "samples"):
        result[name] = [seconds / 100 for seconds in result[name]]


BROKEN = {
    '"schema" is 2, should be 1': lambda run: run.update(schema=2),
    "\"kind\" is 'pie', should be 'ladder'": lambda run: run.update(kind="pie"),
    "something is missing or of another type: KeyError: 'shape'": lambda run: run.pop("shape"),
    "device.name is '', should say what": lambda run: run["device"].update(name=""),
    "versions.torch is None": lambda run: run["versions"].update(torch=None),
    "no step was measured": lambda run: run.update(contexts=[], batches=[]),
    "profile.bandwidth is [2, 1]": lambda run: run["profile"].update(bandwidth=[2, 1]),
    "'/opt/x' is a path": lambda run: run["contexts"][0]["peers"][0].update(note="/opt/x"),
    "is faster than the floor": faster_than_the_floor,
    "kv_bytes is 1, should be": lambda run: run["contexts"][0].update(kv_bytes=1),
    "the floor reads 5 bytes": lambda run: run["contexts"][0]["floor"].update(num_bytes=5),
    "the floor is missing": lambda run: run["contexts"][0].update(floor=None),
    "nothing was timed": lambda run: run["contexts"][0].update(stages=[], peers=[]),
    "should be the median of": lambda run: run["contexts"][0]["stages"][0].update(seconds=0.5),
    "max_error is None": lambda run: run["contexts"][0]["stages"][0].update(max_error=None),
    "max_error is 0.5": lambda run: run["contexts"][0]["stages"][0].update(max_error=0.5),
}


@pytest.mark.quick
@pytest.mark.parametrize("words", BROKEN)
def test_a_json_that_cannot_be_believed_is_told_why(words, tmp_path, capsys):
    run = copy.deepcopy(RUN)
    BROKEN[words](run)
    found = check.problems(run)
    assert len(found) == 1 and words in found[0]
    (tmp_path / "a.json").write_text(json.dumps(run))
    assert check.main([str(tmp_path / "a.json")]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/a.json: {found[0]}\n"


@pytest.mark.quick
def test_the_check_says_that_a_json_is_fine_or_can_not_be_read(tmp_path, capsys):
    assert check.main([str(LADDERS[0])]) == 0
    assert capsys.readouterr().out == f"{LADDERS[0]}: fine\n"
    (tmp_path / "half.json").write_text('{"kind"')
    assert check.main([str(tmp_path / "half.json"), str(LADDERS[0])]) == 2
    assert check.main([]) == 2
    for value in (None, [], 3, {}, {"kind": "ladder", "schema": 1, "device": []}):
        assert len(check.problems(value)) == 1


@pytest.mark.quick
def test_the_page_of_devices_is_made_of_the_files():
    """After a change: make figures"""
    written = (FIGURES / "README.md").read_text(encoding="utf-8")
    assert written == figures_readme.page()
    assert written.count("ladder.json)") == len(LADDERS)
