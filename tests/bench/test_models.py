"""The command over real models' shapes: every row is right, stands in table, JSON and picture."""

from __future__ import annotations

import json

import pytest
import torch

from paged_attention.bench import arguments, check, cli, contender, models, models_table
from paged_attention.bench.models import FP8, Row
from paged_attention.bench.models_plot import draw_models

ROWS = Row(1, 40), Row(3, 17, torch.bfloat16), Row(2, 33, FP8), Row(2, 19, q_len=4)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command on small rows. Returns its status, its JSON and what it printed."""
    monkeypatch.setattr(models, "ROWS", ROWS)
    monkeypatch.setattr(models, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(contender, "MOST_ROUNDS", 3)

    def run_it(*options):
        status = cli.main(["--models", *options, "--out", str(tmp_path)])
        content = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
        return status, content, capsys.readouterr().out

    return run_it


def test_every_row_of_every_model_is_right_and_stands_in_the_json(run, tmp_path):
    status, content, printed = run()
    assert status == 0 and content["left_out"] == []
    asked = [(name, *row[:2]) for name in models.MODELS for row in ROWS]
    assert [(s["model"], s["batch"], s["tokens"]) for s in content["rows"]] == asked
    for step in content["rows"]:
        results = {one["name"]: one for one in step["peers"]}
        assert set(results) == {models.PLANNED, *models.PEERS}
        for name in ("paged_attention_HND", models.PLANNED, "gather_sdpa"):
            assert 0 <= results[name]["max_error"] < 0.1 and results[name]["seconds"] > 0
    assert check.problems(content) == []
    assert (tmp_path / "models.png").stat().st_size > 10_000
    assert models_table.table(content) in printed


def test_the_table_divides_the_times_that_the_json_has(run):
    _, content, _ = run("Gemma-2B")
    step = content["rows"][0]
    seconds = models_table.seconds_of(step)
    faster = seconds["paged_attention_HND"] / seconds["gather_sdpa"]
    line = models_table.cells(step)
    assert line[0] == "Gemma-2B 8/1/256" and float(line[-4]) == pytest.approx(faster, rel=0.01)
    assert len(models_table.markdown(content).splitlines()) == 2 + len(ROWS)


def test_the_table_names_each_row_that_other_processes_disturbed(run):
    _, content, _ = run("Gemma-2B")
    for step in content["rows"]:
        step["other_cores"] = 0.02
    assert "Other processes" not in models_table.table(content)
    content["rows"][3]["other_cores"] = 1.04
    [line] = [x for x in models_table.table(content).splitlines() if "Other processes" in x]
    assert line.startswith("Gemma-2B, 2 x 19, fp32, q_len 4: Other processes used 1.0 cores")


def test_a_row_that_is_too_large_is_left_out_with_the_reason(run, monkeypatch):
    monkeypatch.setattr(models, "MOST_BYTES", 40_000)
    status, content, printed = run("Qwen2.5-0.5B")
    assert status == 0 and len(content["rows"]) + len(content["left_out"]) == len(ROWS)
    assert content["left_out"] and "more than 40.0 kB" in printed


def test_a_wrong_kernel_is_shown_not_timed_and_fails_the_run(run, monkeypatch):
    right = models.planned_hnd
    monkeypatch.setattr(models, "planned_hnd", lambda batch: lambda: right(batch)() + 0.5)
    status, content, printed = run("Qwen2.5-0.5B")
    assert status == 1 and "planned_HND WRONG" in printed
    assert all("seconds" not in step["peers"][0] for step in content["rows"])


def test_ctrl_c_keeps_the_rows_that_were_measured(run, monkeypatch):
    measured, calls = models._measured, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(models, "_measured", interrupted)
    status, content, printed = run("Gemma-2B")
    assert status == 130 and content["interrupted"] and len(content["rows"]) == 2
    assert "Gemma-2B" in printed


def test_the_rows_have_every_batch_length_and_dtype_of_real_steps():
    assert {row.batch for row in models.ROWS} == {1, 16, 256}
    assert {row.tokens for row in models.ROWS} == {128, 1024, 8192}
    assert {models_table.SHORT[str(row.dtype)[6:]] for row in models.ROWS} == {
        "fp32", "fp16", "bf16", "fp8",
    }  # fmt: skip
    assert {row.q_len for row in models.ROWS} == {1, 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "GPT-2"], "'GPT-2' is none of Qwen2.5-0.5B"),
        (["--models", "--context", "64"], "leave out context"),
        (["--models", "--head-size", "64"], "leave out head_size"),
    ],
)
def test_a_bad_option_is_named(options, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        arguments.parse(options)
    assert words in capsys.readouterr().err


def test_a_row_that_a_contender_lost_is_drawn_without_it(run):
    _, content, _ = run("Gemma-2B")
    del content["rows"][0]["peers"][1]["seconds"]
    axes = draw_models(content).axes[0]
    marks = [line for line in axes.lines if line.get_marker() != "None"]
    assert len(marks) == len(ROWS) - 1
