"""`python -m paged_attention`, driven as a user would: what it prints, writes, and returns."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged_attention.bench import arguments, cli, files, ladder, settings, table
from paged_attention.bench import memory as fits
from paged_attention.bench.peers import ours_and_sdpa as peers
from paged_attention.bench.settings import ragged_lengths
from paged_attention.measure import units
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import DeviceProfile, Figure
from paged_attention.stages import STAGES

ROOT = Path(__file__).parents[2]
TINY = "--heads 4 --kv-heads 2 --head-size 16 --partition-size 32".split()
RUNGS = [*STAGES, "paged_attention"]
quick = pytest.mark.quick


PROFILE = DeviceProfile(
    "a machine",
    bandwidth=Figure(1e10, 2e10, "B/s", ""),
    op_cost=Figure(1e-6, 3e-6, "s", ""),
    wave=Figure(2**23, 2**23, "B", ""),
)


@pytest.fixture(autouse=True)
def calibrated(monkeypatch):
    """In this process; the runs in processes of their own measure the machine."""
    monkeypatch.setattr(cli, "calibrate", lambda device: PROFILE)


def command(*arguments, **environment):
    """Arguments of subprocess for `python -m ...`, in an environment where it's importable."""
    path = os.pathsep.join([*environment.pop("first_on_path", []), str(ROOT)])
    return {
        "args": [sys.executable, "-m", *arguments],
        "env": {**os.environ, "PYTHONPATH": path, **environment},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }


def files_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: all stages, a context below a block, one that ends inside a block."""
    folder = tmp_path_factory.mktemp("run")
    result = subprocess.run(
        **command("paged_attention", "--context", "7,333", *TINY), cwd=folder, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return folder, result


# -- a run ----------------------------------------------------------------------------------------


def test_a_run_leaves_pictures_and_their_json_in_the_devices_folder(finished):
    folder, _ = finished
    assert files_under(folder) == [
        "figures",
        "figures/local",
        "figures/local/ladder.json",
        "figures/local/ladder.png",
        "figures/local/ladder_lengths.png",
    ]
    for name in ("ladder", "ladder_lengths"):
        picture = (folder / f"figures/local/{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_the_table_has_a_line_for_each_stage_at_each_context(finished):
    lines = finished[1].stdout.splitlines()
    for name in RUNGS:
        rows = [line.split() for line in lines if line.startswith(name + " ")]
        assert len(rows) == 2, name
    assert sum(line.startswith(("7 tokens", "333 tokens")) for line in lines) == 2
    header = next(line for line in lines if line.startswith("stage"))
    for column in ("time", "quartiles", "vs previous", "x floor", "predicted", "ops", "GEMMs"):
        assert column in header
    assert "GB/s" in finished[1].stdout and "host reads" in header and "peak memory" in header
    assert f"torch {torch.__version__}" in lines[0]
    assert "4 query heads, 2 KV heads, head size 16, float32, block size 16" in lines[1]
    assert lines[1].endswith("partitions of 32, of 1,024 in paged_attention")


def test_progress_goes_to_stderr_and_nothing_else_does(finished):
    errors = finished[1].stderr
    assert all(f"tokens: {name} " in errors for name in RUNGS)
    assert "Traceback" not in errors and "Warning" not in errors


def test_the_json_holds_samples_counts_and_where_they_come_from(finished):
    data = json.loads((finished[0] / "figures/local/ladder.json").read_text())
    assert (data["kind"], data["schema"], data["interrupted"]) == ("ladder", 1, False)
    assert data["device"]["type"] == data["device"]["slug"] == "cpu"
    assert data["device"]["name"] and data["device"]["threads"] >= 1
    assert data["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", data["date"])
    assert data["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", data["commit"])
    assert data["shape"] == {
        "num_seqs": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "block_size": 16,
        "partition_size": 32,
        "kernel_partition_size": 1024,
        "dtype": "float32",
        "layout": "vllm",
    }
    assert set(data["profile"]) == {
        *("bandwidth", "op_cost", "rearrange_bandwidth", "fresh_page_cost", "wave")
    }
    assert all(low <= high for low, high in data["profile"].values())
    assert [entry["context"] for entry in data["contexts"]] == [7, 333]
    assert [entry["seq_lens"] for entry in data["contexts"]] == [[7], [333]]
    assert data["batches"] == []
    for entry in data["contexts"]:
        assert entry["kv_bytes"] == 2 * entry["context"] * 2 * 16 * 4
        assert [stage["name"] for stage in entry["stages"]] == RUNGS
        for timed in (entry["floor"], *entry["stages"]):
            low, high = timed["spread"]
            assert 0 < low <= timed["seconds"] <= high and timed["cold_seconds"] > 0
            assert len(timed["samples"]) >= 3 and timed["runs"] >= len(timed["samples"])
            assert min(timed["samples"]) <= timed["seconds"] <= max(timed["samples"])
        assert all(stage["max_error"] < 1e-5 for stage in entry["stages"])
    naive = data["contexts"][1]["stages"][0]
    assert (naive["host_reads"], naive["gemms"]) == (21 + 1, 2 * 11 + 1)


def test_the_json_names_no_path_and_no_user(finished):
    text = (finished[0] / "figures/local/ladder.json").read_text()
    for secret in (str(ROOT), str(finished[0]), str(Path.home()), os.uname().nodename):
        assert secret not in text


def test_the_table_is_made_of_the_json_alone(finished):
    data = json.loads((finished[0] / "figures/local/ladder.json").read_text())
    for entry in data["contexts"]:
        assert table.table(entry) in finished[1].stdout


def test_without_matplotlib_table_and_json_still_come_and_a_line_says_how(tmp_path):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "matplotlib.py").write_text("raise ImportError('not installed')")
    (shadow / "tqdm.py").write_text("raise ImportError('not installed')")
    arguments = ["--context", "40", "--stages", "single_bmm", "--out", "here", *TINY]
    result = subprocess.run(
        **command("paged_attention", *arguments, first_on_path=[str(shadow)]),
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert files_under(tmp_path / "here") == ["ladder.json"]
    hints = [line for line in result.stdout.splitlines() if "pip install" in line]
    assert len(hints) == 1
    assert (
        "pip install -e .[notebooks]" in hints[0]
        and "paged_attention.bench.figures here" in hints[0]
    )
    assert "single_bmm" in result.stdout and "Traceback" not in result.stderr

    drawing = subprocess.run(
        **command("paged_attention.bench.figures", "here", first_on_path=[str(shadow)]),
        cwd=tmp_path,
        timeout=60,
    )
    assert drawing.returncode == 1
    assert drawing.stderr.splitlines() == ["Figures need matplotlib: pip install -e .[notebooks]"]


def run(capsys, *arguments):
    """In this process: (exit status, stdout, stderr)."""
    try:
        status = cli.main([*TINY, *arguments])
    except SystemExit as leave:
        status = leave.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("dtype", ["fp32", "float16", "torch.bfloat16"])
def test_dtypes_go_by_either_name(dtype, tmp_path, capsys):
    out = tmp_path / "deep" / "er"
    stages = "fused_phase2,paged_attention"
    status, text, _ = run(
        capsys, "--dtype", dtype, "--context", "70", "--stages", stages, "--out", str(out)
    )
    assert status == 0
    data = json.loads((out / "ladder.json").read_text())
    assert data["shape"]["dtype"] == str(arguments.DTYPES[dtype.removeprefix("torch.")])[6:]
    assert [stage["name"] for stage in data["contexts"][0]["stages"]] == stages.split(",")


def test_stages_keep_the_ladders_order_and_contexts_the_users(tmp_path, capsys):
    status, text, _ = run(
        capsys,
        *("--context", "80, 33,80", "--stages", "single_tile,single_bmm"),
        *("--out", str(tmp_path)),
    )
    assert status == 0
    entries = json.loads((tmp_path / "ladder.json").read_text())["contexts"]
    assert [entry["context"] for entry in entries] == [80, 33]
    assert [s["name"] for s in entries[0]["stages"]] == ["single_bmm", "single_tile"]


# -- a stage that is wrong ------------------------------------------------------------------------


def test_a_wrong_stage_is_reported_not_timed_and_fails_the_run(tmp_path, capsys, monkeypatch):
    def forgets_the_newest_token(query, key, value, tables, seq_lens, scale, partition_size):
        return right(query, key, value, tables, seq_lens - 1, scale, partition_size)

    right = STAGES["single_bmm"]
    monkeypatch.setitem(STAGES, "single_bmm", forgets_the_newest_token)
    arguments = "--context", "50", "--stages", "single_bmm,gqa_broadcast", "--out", str(tmp_path)
    status, text, _ = run(capsys, *arguments)
    assert status == 1
    assert re.search(r"^single_bmm  WRONG: off by \S+, \S+ is allowed$", text, re.M)
    wrong, fine = json.loads((tmp_path / "ladder.json").read_text())["contexts"][0]["stages"]
    assert wrong["failure"].startswith("WRONG") and "seconds" not in wrong
    assert "failure" not in fine and fine["seconds"] > 0
    assert (tmp_path / "ladder.png").exists()


def test_a_stage_of_nans_is_wrong_and_one_that_raises_spares_the_others(
    tmp_path, capsys, monkeypatch
):
    def out_of_memory(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] not enough memory\nmore lines")

    monkeypatch.setitem(STAGES, "single_bmm", out_of_memory)
    monkeypatch.setitem(STAGES, "single_tile", lambda query, *rest, **options: query * torch.nan)
    monkeypatch.setattr(fits, "needed_bytes", lambda settings, context: (0, ""))
    monkeypatch.setattr(cli, "needed_bytes", lambda settings, context: (0, ""))
    stages = "single_bmm,gqa_broadcast,single_tile"
    status, text, _ = run(capsys, "--context", "50", "--stages", stages, "--out", str(tmp_path))
    assert status == 1
    assert "single_bmm  RuntimeError: [enforce fail at alloc_cpu.cpp] not enough memory\n" in text
    assert "single_tile  WRONG: off by nan" in text
    names = [
        line.split()[0] for line in text.splitlines() if re.match(r"\w+ +[\d.]+ [mu]?s ", line)
    ]
    assert names == ["gqa_broadcast"]


# -- peers ----------------------------------------------------------------------------------------


@pytest.fixture
def quick_peers(monkeypatch):
    """One that is slow to compile is skipped, one that may not be there is compiled code; a short
    ragged batch."""

    def no_compiler(data):
        raise peers.Unavailable("no compiler here")

    def compiled(data):
        return peers.gather_sdpa(data)[0], "a library of version 3"

    monkeypatch.setattr(cli, "ragged_lengths", lambda: (50, 7, 130))

    for name, make in (("flex_paged", no_compiler), ("vllm_cpu_op", compiled)):
        monkeypatch.setitem(peers.PEERS, name, peers.PEERS[name]._replace(make=make))


def test_peers_stand_in_table_and_json_timed_or_with_the_reason(tmp_path, capsys, quick_peers):
    if "enable_gqa" not in (torch.nn.functional.scaled_dot_product_attention.__doc__ or ""):
        pytest.skip("SDPA without grouped heads")
    arguments = "--peers", "--context", "50", "--stages", "fused_phase2,paged_attention"
    status, text, errors = run(capsys, *arguments, "--out", str(tmp_path))
    assert status == 0
    data = json.loads((tmp_path / "ladder.json").read_text())
    (entry,) = data["contexts"]
    results = {peer["name"]: peer for peer in entry["peers"]}
    assert list(results) == list(peers.PEERS)
    assert results.pop("flex_paged") == {"name": "flex_paged", "skipped": "no compiler here"}
    for name, result in results.items():
        assert result["max_error"] < 1e-5 and len(result["samples"]) >= 3, name
        assert re.search(rf"^{name} +[\d.]+ [mu]?s ", text, re.M), name
    for counted in ("ops", "gemms", "host_reads", "peak_bytes"):
        assert results["vllm_cpu_op"][counted] is None
        assert results["dense_sdpa"][counted] is not None
    assert "\nflex_paged  skipped: no compiler here\n" in text
    assert "\nvllm_cpu_op  a library of version 3\n" in text
    assert "flex_paged skipped, no compiler here" in errors
    assert text.count(table.table(entry)) == 1

    seconds = {result["name"]: result["seconds"] for result in entry["stages"]} | {
        name: result["seconds"] for name, result in results.items()
    }
    for one, other in (
        ("paged_attention", "fused_phase2"),
        ("paged_attention_HND", "gather_sdpa"),
        ("paged_attention_HND", "vllm_cpu_op"),
    ):
        value = re.search(rf"^{one} / {other} +([\d.]+) ", text, re.M)[1]
        assert float(value) == pytest.approx(seconds[one] / seconds[other], rel=0.02, abs=0.006)
    assert "paged_attention_HND / flex_paged" not in text
    assert (tmp_path / "ladder.png").exists()

    (batch,) = data["batches"]
    assert (batch["seq_lens"], batch["context"], batch["stages"]) == ([50, 7, 130], 187, [])
    names = ["paged_attention_HND", "gather_sdpa", "vllm_cpu_op"]
    assert [peer["name"] for peer in batch["peers"]] == names
    assert all(peer["max_error"] < 1e-5 and peer["seconds"] > 0 for peer in batch["peers"])
    assert "\n3 sequences of 7 to 130 tokens, 187 in all, K and V " in text
    assert text.count(table.table(batch)) == 1


@quick
def test_the_ragged_batch_is_always_the_same_and_spans_short_and_long():
    lengths = ragged_lengths()
    assert lengths == ragged_lengths() and len(lengths) == 16
    assert (min(lengths), max(lengths), sum(lengths)) == (18, 15_897, 32_205)


def test_a_ragged_batch_that_does_not_fit_is_skipped(tmp_path, capsys, monkeypatch, quick_peers):
    monkeypatch.setattr(cli, "ragged_lengths", lambda: (10**6, 10**6))
    monkeypatch.setattr(cli, "available_bytes", lambda device: 30_000_000)
    arguments = "--peers", "--context", "50", "--stages", "single_bmm", "--out", str(tmp_path)
    status, text, _ = run(capsys, *arguments)
    assert status == 0
    assert "\n2 sequences of 1,000,000 to 1,000,000 tokens, 2,000,000 in all: skipped" in text
    assert json.loads((tmp_path / "ladder.json").read_text())["batches"] == []


def test_a_wrong_peer_is_shown_as_such_not_timed_and_fails_the_run(
    tmp_path, capsys, monkeypatch, quick_peers
):
    def forgets_the_scale(data):
        call, note = peers.paged_attention_hnd(data)
        call.options["scale"] *= 1.5
        return call, note

    wrong = peers.PEERS["dense_sdpa"]._replace(make=forgets_the_scale)
    monkeypatch.setitem(peers.PEERS, "dense_sdpa", wrong)
    arguments = "--peers", "--context", "50", "--stages", "single_bmm", "--out", str(tmp_path)
    status, text, _ = run(capsys, *arguments)
    assert status == 1
    assert re.search(r"^dense_sdpa  WRONG: off by \S+, \S+ is allowed$", text, re.M)
    (entry,) = json.loads((tmp_path / "ladder.json").read_text())["contexts"]
    result = next(peer for peer in entry["peers"] if peer["name"] == "dense_sdpa")
    assert "WRONG" in result["failure"] and "seconds" not in result


def test_without_peers_there_are_none_and_predictions_are_there(finished):
    data = json.loads((finished[0] / "figures/local/ladder.json").read_text())
    for entry in data["contexts"]:
        assert "peers" not in entry
        for bands in (*entry["predicted"].values(), entry["predicted_here"]):
            assert list(bands) == RUNGS
            assert all(0 < low <= high for low, high in bands.values())
    assert " / " not in finished[1].stdout


# -- bad options ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "naive_loop"], ["--stages", "'naive_loop'", "naive_loops"]),
        (["--stages", "single_bmm,"], ["--stages", "''"]),
        (["--device", "tpu"], ["--device", "'tpu'", "cpu"]),
        (["--device", "mps"], ["--device", "'mps'", "cuda"]),
        (["--device", "meta"], ["--device", "'meta'"]),
        (["--device", "cuda:99"], ["--device", "'cuda:99'"]),
        (["--device", ""], ["--device", "''"]),
        (["--dtype", "fp8"], ["--dtype", "'fp8'", "fp16"]),
        (["--dtype", "float64"], ["--dtype", "'float64'"]),
        (["--dtype", "torch.torch.half"], ["--dtype", "'torch.torch.half'"]),
        (["--context", "0"], ["--context", "'0'", "whole number"]),
        (["--context", "-5"], ["--context", "-5"]),
        (["--context", "1e5"], ["--context", "'1e5'", "whole number"]),
        (["--context", "64,"], ["--context", "''"]),
        (["--context", "64,many"], ["--context", "'many'"]),
        (["--context", "10" * 12], ["--context", "10" * 12, "GB", "usable"]),
        (["--context", "100000000000"], ["--context", "100000000000", "TB", "usable"]),
        (["--heads", "5"], ["--heads 5", "--kv-heads 2"]),
        (["--heads", "0"], ["--heads", "'0'"]),
        (["--heads", "2.0"], ["--heads", "'2.0'"]),
        (["--kv-heads", "three"], ["--kv-heads", "'three'"]),
        (["--head-size", "18"], ["--head-size 18", "multiple of 4", "vllm"]),
        (["--head-size", "12", "--dtype", "bf16"], ["--head-size 12", "multiple of 8"]),
        (["--block-size", "0"], ["--block-size", "'0'"]),
        (["--partition-size", "-1"], ["--partition-size", "-1"]),
        (["--out", "a-file"], ["--out a-file", "not a folder"]),
        (["--out", "a-file/below"], ["--out a-file/below", "a-file is not a folder"]),
        (["--out", "taken"], ["--out taken", "ladder.png is a folder"]),
        (["--contxt", "64"], ["--contxt"]),
        (["--cont", "64"], ["--cont"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_a_bad_option_is_one_line_naming_it_and_its_value(
    arguments, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    (tmp_path / "taken" / "ladder.png").mkdir(parents=True)
    before = files_under(tmp_path)
    status, text, errors = run(capsys, *arguments)
    assert status == 2
    assert text == ""
    assert len(errors.splitlines()) == 1
    assert all(word in errors for word in words), errors
    assert files_under(tmp_path) == before


@quick
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys):
    tmp_path.chmod(0o500)
    status, _, errors = run(capsys, "--out", str(tmp_path / "new"))
    assert status == 2 and "can't be written to" in errors


@quick
def test_a_folder_without_leave_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert files.refusal(tmp_path / "a" / "b", ("x",)) == f"{tmp_path} can't be written to"


def test_a_bad_option_ends_the_process_with_2(tmp_path):
    result = subprocess.run(
        **command("paged_attention", "--context", "0"), cwd=tmp_path, timeout=60
    )
    assert (result.returncode, result.stdout, files_under(tmp_path)) == (2, "", [])
    assert result.stderr.splitlines() == [
        "python -m paged_attention: argument --context: '0' is not a whole number of at least 1"
    ]


# -- memory ---------------------------------------------------------------------------------------


TINY_SETTINGS = settings.Settings(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    partition_size=32,
    stages=("single_bmm", "gqa_broadcast", "paged_attention"),
)


@quick
def test_the_longest_context_is_the_last_thousand_that_fits():
    usable = 10_000_000
    longest = fits.longest_context(TINY_SETTINGS, usable, 100_000)
    assert longest % 1000 == 0 and 1000 <= longest < 100_000
    assert fits.needed_bytes(TINY_SETTINGS, (longest,))[0] <= usable
    assert fits.needed_bytes(TINY_SETTINGS, (longest + 1000,))[0] > usable
    assert fits.longest_context(TINY_SETTINGS, usable, longest - 3) == longest - 3
    assert fits.longest_context(TINY_SETTINGS, 1000, 100_000) == 0


@quick
def test_what_a_context_needs_is_the_caches_the_floors_copy_and_the_largest_stage():
    workload = settings.Settings(stages=("single_bmm", "gqa_broadcast"))
    inputs = workload.inputs([5000], device="meta")
    peak = count(lambda: STAGES["single_bmm"](*inputs, 1.0)).peak_bytes
    kv_bytes = 2 * 5000 * 4 * 256 * 4
    caches = 2 * (313 + 1) * 16 * 4 * 256 * 4  # in whole blocks, and one to spare
    assert fits.needed_bytes(workload, (5000,)) == (caches + kv_bytes + peak, "single_bmm")
    assert peak > 6 * kv_bytes  # K and V of every query head


def test_by_default_up_to_the_longest_that_fits_and_it_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "available_bytes", lambda device: 30_000_000)
    monkeypatch.chdir(tmp_path)
    status, text, _ = run(capsys, "--stages", ",".join(TINY_SETTINGS.stages))
    assert status == 0
    data = json.loads((tmp_path / "figures/local/ladder.json").read_text())
    longest = fits.longest_context(TINY_SETTINGS, 24_000_000, 100_000)
    assert longest >= 2 * 8192
    assert [entry["context"] for entry in data["contexts"]] == [1024, 8192, longest]
    line = text.splitlines()[0]
    assert line.startswith(f"Contexts: 1,024, 8,192 and {longest:,} tokens")
    assert "single_bmm" in line and "24.0 MB usable" in line and "100,000 would need" in line


@quick
def test_a_machine_too_small_for_1024_tokens_is_told_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "available_bytes", lambda device: 50_000)
    status, text, errors = run(capsys, "--out", str(tmp_path / "new"))
    assert (status, text) == (2, "")
    assert "--context 1024 needs" in errors.splitlines()[-1]
    assert files_under(tmp_path) == []


@quick
def test_a_context_that_only_its_stages_make_too_long_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "available_bytes", lambda device: 10_000_000)
    arguments = "--stages", "single_bmm", "--context", "9000", "--out", str(tmp_path / "new")
    status, text, errors = run(capsys, *arguments)
    assert (status, text) == (2, "")
    assert re.fullmatch(
        r"python -m paged_attention: --context 9000 needs [\d.]+ MB, most of it for single_bmm; "
        r"8.00 MB usable \(80% of what is free\)\n",
        errors,
    )


# -- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    process = subprocess.Popen(
        **command("paged_attention", "--context", "3000", "--out", "here"),
        cwd=tmp_path,
        # a parent that runs in the background has its children ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        for line in process.stderr:
            if "tokens: naive_loops" in line:
                process.send_signal(signal.SIGINT)
                break
        text, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Interrupted" in errors and "Traceback" not in errors
    assert files_under(tmp_path) == ["here", "here/ladder.json", "here/ladder.png"]
    data = json.loads((tmp_path / "here/ladder.json").read_text())
    assert data["interrupted"] is True
    (entry,) = data["contexts"]
    assert 1 <= len(entry["stages"]) < len(RUNGS)
    assert entry["stages"][0]["name"] == "naive_loops" and entry["stages"][0]["samples"]
    assert table.table(entry) in text


@quick
def test_ctrl_c_before_anything_is_measured_writes_nothing(tmp_path, capsys, monkeypatch):
    def interrupted(self, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder.StepRun, "run", interrupted)
    status, _, errors = run(capsys, "--context", "40", "--out", str(tmp_path / "new"))
    assert status == 130
    assert errors.splitlines()[-1] == "Interrupted before anything was measured."
    assert files_under(tmp_path) == []


def test_ctrl_c_in_a_later_context_keeps_the_earlier_ones(tmp_path, capsys, monkeypatch):
    run_context = ladder.StepRun.run

    def interrupted_at_60(self, progress):
        if self.seq_lens == (60,):
            raise KeyboardInterrupt
        run_context(self, progress)

    monkeypatch.setattr(ladder.StepRun, "run", interrupted_at_60)
    arguments = "--context", "40,60,80", "--stages", "single_bmm", "--out", str(tmp_path)
    assert run(capsys, *arguments)[0] == 130
    data = json.loads((tmp_path / "ladder.json").read_text())
    assert [entry["context"] for entry in data["contexts"]] == [40]
    assert data["interrupted"] is True


# -- numbers and files ----------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (87.06e-6, "87.1 us"),
        (0.4e-6, "0.40 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (1.2345, "1.23 s"),
        (123.4, "123 s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(value, text):
    assert units.human_seconds(value) == text


@quick
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (819_200_000, "819 MB"),
        (999_600_000, "1.00 GB"),
        (7_415_305_808, "7.42 GB"),
        (2.5e15, "2500 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(value, text):
    assert units.human_bytes(value) == text


@quick
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "ladder.json"
    files.write_json(target, {"samples": [1.5, 2.5], "names": ["a"]})
    assert json.loads(target.read_text()) == {"samples": [1.5, 2.5], "names": ["a"]}
    assert '"samples": [ 1.5, 2.5 ]' in target.read_text()  # on one line

    with pytest.raises(ValueError):
        files.write_json(target, {"seconds": float("nan")})

    def disk_full(self, content):
        open(self, "wb").write(content[:3])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="disk full"):
        files.write_json(target, {"samples": []})
    assert json.loads(target.read_text())["samples"] == [1.5, 2.5]
    assert files_under(tmp_path) == ["ladder.json"]


@quick
def test_the_defaults_are_the_series_workload():
    options = arguments.parser_of_options().parse_args([])
    assert (options.heads, options.kv_heads, options.head_size) == (24, 4, 256)
    assert (options.block_size, options.partition_size, options.dtype) == (16, 512, torch.float32)
    assert options.stages == [*STAGES, "paged_attention"]
    assert cli.LENGTHS == (1024, 8192, 32_768, 100_000)
    assert (cli.SHORT, cli.LONGEST) == (1024, 100_000)


def test_a_run_with_its_defaults_touches_no_tracked_file(tmp_path):
    """In a copy of the project, as a newcomer runs it: the tree stays clean, and the tests that
    hold pictures and README to the committed measurements stay green."""

    def git(*arguments, cwd=tmp_path):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
        return done.stdout

    for name in git("ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).split("\0")[:-1]:
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for step in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a clone"]):
        git(*step)
    inside = {"PYTHONPATH": str(tmp_path)}
    run = command("paged_attention", "--context", "7,64", *TINY)
    run["env"].update(inside)
    done = subprocess.run(**run, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures/local/ladder.png").exists()
    assert git("status", "--porcelain") == ""
    held = [
        "tests/bench/test_figures.py",
        "tests/project/test_readme.py",
        "-k",
        "committed or beside or readme",
    ]
    run = command("pytest", "-q", "-p", "no:cacheprovider", *held)
    run["env"].update(inside)
    done = subprocess.run(**run, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
