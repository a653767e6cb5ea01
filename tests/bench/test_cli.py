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

from paged_attention.bench import arguments, cli, contender, files, ladder, memory, peers, table
from paged_attention.bench.peers import sdpa
from paged_attention.bench.settings import LADDER, Settings, ragged_lengths
from paged_attention.measure import units
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import DeviceProfile, Figure
from paged_attention.stages import STAGES

ROOT = Path(__file__).parents[2]
TINY = "--heads 4 --kv-heads 2 --head-size 16 --partition-size 32".split()
quick = pytest.mark.quick

PROFILE = DeviceProfile(
    "a machine",
    bandwidth=Figure(1e10, 2e10, "B/s", ""),
    op_cost=Figure(1e-6, 3e-6, "s", ""),
    wave=Figure(2**23, 2**23, "B", ""),
)


@pytest.fixture(autouse=True)
def in_little_time(monkeypatch):
    """In this process; the run in a process of its own measures the machine, and takes turns."""
    monkeypatch.setattr(cli, "calibrate", lambda device: PROFILE)
    monkeypatch.setattr(ladder, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(contender, "MOST_ROUNDS", 3)


def files_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def git(*arguments, cwd):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def python_in(folder, *arguments, timeout=120):
    """`python -m ...` in a process of its own, with the package that lies in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", *arguments]
    options = {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(command, cwd=folder, env=environment, **options)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """A copy of the project, and what a run in it said: all stages, with the defaults but for the
    sizes; a context below a block, one that ends inside a block."""
    copy = tmp_path_factory.mktemp("copy")
    for name in git("ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).split("\0")[:-1]:
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    for step in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a clone"]):
        git(*step, cwd=copy)
    result = python_in(copy, "paged_attention", "--context", "7,333", *TINY)
    assert result.returncode == 0, result.stderr
    return copy, result


@pytest.fixture(scope="module")
def finished(newcomer):
    """(the run's JSON, its stdout)"""
    copy, result = newcomer
    return json.loads((copy / "figures/local/ladder.json").read_text()), result.stdout


# -- a run ----------------------------------------------------------------------------------------


def test_a_run_with_its_defaults_touches_no_tracked_file(newcomer):
    """And the tests that hold pictures and README to the committed measurements stay green."""
    copy, _ = newcomer
    assert git("status", "--porcelain", cwd=copy) == ""
    held = ["tests/bench/test_figures.py", "tests/project/test_readme.py"]
    chosen = ["-k", "beside or ladders or predicted_within or measured_table"]
    done = python_in(copy, "pytest", "-q", "-p", "no:cacheprovider", *held, *chosen, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_run_leaves_pictures_and_their_json_in_a_folder_of_the_users_own(newcomer):
    local = newcomer[0] / "figures/local"
    assert files_under(local) == ["ladder.json", "ladder.png", "ladder_lengths.png"]
    for name in ("ladder.png", "ladder_lengths.png"):
        picture = (local / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_the_table_has_a_line_for_each_stage_at_each_context(finished):
    lines = finished[1].splitlines()
    for name in LADDER:
        assert sum(line.startswith(name + " ") for line in lines) == 2, name
    assert sum(line.startswith(("7 tokens", "333 tokens")) for line in lines) == 2
    header = next(line for line in lines if line.startswith("stage"))
    assert re.split("  +", header) == table._HEADING
    assert "GB/s" in finished[1]
    assert f"torch {torch.__version__}" in lines[0]
    assert "4 query heads, 2 KV heads, head size 16, float32, block size 16" in lines[1]
    assert lines[1].endswith("partitions of 32, of 1,024 in paged_attention")


def test_progress_goes_to_stderr_and_nothing_else_does(newcomer):
    errors = newcomer[1].stderr
    assert all(f"tokens: {name} " in errors for name in LADDER)
    assert "Traceback" not in errors and "Warning" not in errors


def test_the_json_holds_samples_counts_and_where_they_come_from(newcomer, finished):
    data, _ = finished
    assert (data["kind"], data["schema"], data["interrupted"]) == ("ladder", 1, False)
    assert data["device"]["type"] == data["device"]["slug"] == "cpu"
    assert data["device"]["name"] and data["device"]["threads"] >= 1
    assert data["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", data["date"])
    head = git("rev-parse", "HEAD", cwd=newcomer[0]).strip()
    assert (data["commit"], data["modified"]) == (head, False)
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
        assert [stage["name"] for stage in entry["stages"]] == list(LADDER)
        for timed in (entry["floor"], *entry["stages"]):
            low, high = timed["spread"]
            assert 0 < low <= timed["seconds"] <= high and timed["cold_seconds"] > 0
            assert len(timed["samples"]) >= 3 and timed["runs"] >= len(timed["samples"])
            assert min(timed["samples"]) <= timed["seconds"] <= max(timed["samples"])
        assert all(stage["max_error"] < 1e-5 for stage in entry["stages"])
    naive = data["contexts"][1]["stages"][0]
    assert (naive["host_reads"], naive["gemms"]) == (21 + 1, 2 * 11 + 1)


def test_the_json_names_no_path_and_no_user(newcomer):
    text = (newcomer[0] / "figures/local/ladder.json").read_text()
    for secret in (str(ROOT), str(newcomer[0]), str(Path.home()), os.uname().nodename):
        assert secret not in text


def test_the_table_is_made_of_the_json_alone(finished):
    data, text = finished
    for entry in data["contexts"]:
        assert table.table(entry) in text


def test_without_peers_there_are_none_and_predictions_are_there(finished):
    data, text = finished
    for entry in data["contexts"]:
        assert "peers" not in entry
        assert entry["published"] == []  # nobody published such a shape
        for bands in (*entry["predicted"].values(), entry["predicted_here"]):
            assert [name for name in bands if name != "floor"] == list(LADDER)
            assert all(0 < low <= high for low, high in bands.values())
    assert " / " not in text


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command in this process and in an empty folder: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            status = cli.main([*TINY, *arguments])
        except SystemExit as leave:
            status = leave.code
        return status, *capsys.readouterr()

    return run


def written(folder="figures/local"):
    return json.loads(Path(folder, "ladder.json").read_text())


def test_without_matplotlib_table_and_json_still_come_and_a_line_says_how(run, monkeypatch):
    names = [name for name in sys.modules if name.startswith("matplotlib.")]
    for name in (*names, "matplotlib", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    status, text, _ = run("--context", "40", "--stages", "single_bmm", "--out", "here")
    assert status == 0
    assert files_under(Path("here")) == ["ladder.json"]
    [hint] = [line for line in text.splitlines() if "pip install" in line]
    assert "pip install -e .[notebooks]" in hint and "paged_attention.bench.figures here" in hint
    assert "single_bmm" in text


@pytest.mark.parametrize("dtype", ["fp16", "bfloat16"])
def test_other_dtypes_are_measured_too(dtype, run):
    stages = "fused_phase2,paged_attention"
    sizes = "--dtype", dtype, "--context", "70", "--stages", stages
    assert run(*sizes, "--out", "deep/er")[0] == 0
    data = written("deep/er")
    assert data["shape"]["dtype"] == dtype.replace("fp", "float")
    assert [stage["name"] for stage in data["contexts"][0]["stages"]] == stages.split(",")


@quick
def test_dtypes_go_by_short_names_and_by_torchs():
    for name, dtype in {"fp16": torch.float16, "bfloat16": torch.bfloat16}.items():
        settings = arguments.parse(["--dtype", name]).settings
        assert settings.dtype == dtype


def test_stages_keep_the_ladders_order_and_contexts_the_users(run):
    assert run("--context", "80, 33,80", "--stages", "single_tile,single_bmm")[0] == 0
    entries = written()["contexts"]
    assert [entry["context"] for entry in entries] == [80, 33]
    assert [stage["name"] for stage in entries[0]["stages"]] == ["single_bmm", "single_tile"]


# -- a stage that is wrong ------------------------------------------------------------------------


def replace_stage(monkeypatch, name, stage):
    """What the run calls. What a stage costs is still predicted of the right one."""
    right = Settings.call

    def call(settings, called, inputs):
        return right(settings, called, inputs) if called != name else lambda: stage(inputs)

    monkeypatch.setattr(Settings, "call", call)


def test_a_wrong_stage_is_reported_not_timed_and_fails_the_run(run, monkeypatch):
    def forgets_the_newest_token(inputs):
        shorter = inputs._replace(seq_lens=inputs.seq_lens - 1)
        return STAGES["single_bmm"](*shorter, 0.25, partition_size=32)

    replace_stage(monkeypatch, "single_bmm", forgets_the_newest_token)
    status, text, _ = run("--context", "50", "--stages", "single_bmm,gqa_broadcast")
    assert status == 1
    assert re.search(r"^single_bmm  WRONG: off by \S+, \S+ is allowed$", text, re.M)
    wrong, fine = written()["contexts"][0]["stages"]
    assert wrong["failure"].startswith("WRONG") and "seconds" not in wrong
    assert "failure" not in fine and fine["seconds"] > 0
    assert Path("figures/local/ladder.png").exists()


def test_a_stage_of_nans_is_wrong_and_one_that_raises_spares_the_others(run, monkeypatch):
    def out_of_memory(inputs):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] not enough memory\nmore lines")

    replace_stage(monkeypatch, "single_bmm", out_of_memory)
    replace_stage(monkeypatch, "single_tile", lambda inputs: inputs.query * torch.nan)
    status, text, _ = run("--context", "50", "--stages", "single_bmm,gqa_broadcast,single_tile")
    assert status == 1
    assert "single_bmm  RuntimeError: [enforce fail at alloc_cpu.cpp] not enough memory\n" in text
    assert "single_tile  WRONG: off by nan" in text
    timed = re.findall(r"^(\w+) +[\d.]+ [mu]?s ", text, re.M)
    assert timed == ["gqa_broadcast"]


# -- peers ----------------------------------------------------------------------------------------


def replace_peer(monkeypatch, name, make):
    monkeypatch.setitem(peers.PEERS, name, peers.PEERS[name]._replace(make=make))


@pytest.fixture
def quick_peers(monkeypatch):
    """One that is slow to compile is skipped, one that may not be there is compiled code; a short
    ragged batch."""

    def no_compiler(batch):
        raise peers.Unavailable("no compiler here")

    def compiled(batch):
        return sdpa.gather_sdpa(batch)[0], "a library of version 3"

    monkeypatch.setattr(cli, "ragged_lengths", lambda: (50, 7, 130))
    replace_peer(monkeypatch, "flex_paged", no_compiler)
    replace_peer(monkeypatch, "vllm_cpu_op", compiled)


def test_peers_stand_in_table_and_json_timed_or_with_the_reason(run, quick_peers):
    if "enable_gqa" not in (torch.nn.functional.scaled_dot_product_attention.__doc__ or ""):
        pytest.skip("SDPA without grouped heads")
    status, text, errors = run(
        "--peers", "--context", "50", "--stages", "fused_phase2,paged_attention"
    )
    assert status == 0
    data = written()
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
    assert "flex_paged skipped: no compiler here" in errors
    assert text.count(table.table(entry)) == 1

    seconds = {r["name"]: r["seconds"] for r in ladder.results_of(entry) if "seconds" in r}
    for one, other in (
        ("paged_attention", "fused_phase2"),
        ("paged_attention_HND", "paged_attention"),
        ("dense_sdpa", "paged_attention_HND"),
        ("vllm_cpu_op", "paged_attention_HND"),
    ):
        [line] = re.findall(rf"^{one} .*", text, re.M)[:1]
        expected = table._compared(seconds[one], seconds[other])
        assert re.split("  +", line)[3] == expected
    assert "\nPeers are compared with paged_attention_HND" in text
    assert Path("figures/local/ladder.png").exists()

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


def test_a_ragged_batch_that_does_not_fit_is_skipped(run, monkeypatch, quick_peers):
    monkeypatch.setattr(cli, "ragged_lengths", lambda: (10**6, 10**6))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 30_000_000)
    status, text, _ = run("--peers", "--context", "50", "--stages", "single_bmm")
    assert status == 0
    assert "\n2 sequences of 1,000,000 to 1,000,000 tokens, 2,000,000 in all: skipped" in text
    assert written()["batches"] == []


def test_a_wrong_peer_is_shown_as_such_not_timed_and_fails_the_run(run, monkeypatch, quick_peers):
    def is_too_large(batch):
        call, note = sdpa.dense_sdpa(batch)
        return lambda: 1.5 * call(), note

    replace_peer(monkeypatch, "dense_sdpa", is_too_large)
    status, text, _ = run("--peers", "--context", "50", "--stages", "single_bmm")
    assert status == 1
    assert re.search(r"^dense_sdpa  WRONG: off by \S+, \S+ is allowed$", text, re.M)
    (entry,) = written()["contexts"]
    result = next(peer for peer in entry["peers"] if peer["name"] == "dense_sdpa")
    assert "WRONG" in result["failure"] and "seconds" not in result


# -- bad options ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("option", "words"),
    {
        "--stages naive_loop": "'naive_loop' naive_loops",
        "--stages single_bmm,": "''",
        "--device tpu": "'tpu' cpu",
        "--device mps": "'mps'",
        "--device meta": "'meta'",
        "--device cuda:99": "'cuda:99'",
        "--device ": "''",
        "--dtype fp8": "'fp8' fp16",
        "--dtype float64": "'float64'",
        "--dtype torch.torch.half": "'torch.torch.half'",
        "--context 0": "'0' whole number",
        "--context -5": "-5",
        "--context 1e5": "'1e5' whole number",
        "--context 64,": "''",
        "--context 64,many": "'many'",
        "--context 1010101010": "1010101010 K and V GB usable",
        "--context 100000000000": "'100000000000' below",
        "--heads 5": "5 --kv-heads 2",
        "--heads 0": "'0'",
        "--heads 2.0": "'2.0'",
        "--heads 3000000000": "'3000000000' below",
        "--kv-heads three": "'three'",
        "--head-size 18": "18 multiple 4, vllm",
        "--block-size 0": "'0'",
        "--partition-size -1": "-1",
        "--out ": "'' names no folder",
        "--out a-file": "a-file not folder",
        "--out a-file/below": "a-file/below folder",
        "--out taken": "taken ladder.png folder",
        "--contxt 64": "",
        "--cont 64": "",
        "surplus": "",
    }.items(),
)
def test_a_bad_option_is_one_line_naming_it_and_its_value(option, words, run, tmp_path):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "taken" / "ladder.png").mkdir(parents=True)
    before = files_under(tmp_path)
    status, text, errors = run(*option.split(" "))
    assert (status, text) == (2, "")
    assert len(errors.splitlines()) == 1
    assert all(word in errors for word in [option.split(" ")[0], *words.split()]), errors
    assert files_under(tmp_path) == before


@quick
def test_a_head_size_is_judged_by_its_dtype(run):
    status, _, errors = run("--head-size", "12", "--dtype", "bf16")
    assert status == 2 and "--head-size 12 is not a multiple of 8" in errors


def test_a_bad_option_ends_the_process_with_2():
    result = python_in(ROOT, "paged_attention", "--context", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "python -m paged_attention: argument --context: '0' is not a whole number "
        "of at least 1 and below 2147483648"
    ]


# -- memory ---------------------------------------------------------------------------------------


@quick
def test_what_a_context_needs_is_the_caches_the_floors_copy_and_the_largest_stage():
    workload = Settings(stages=("single_bmm", "gqa_broadcast"))
    inputs = workload.inputs([5000], device="meta")
    peak = count(lambda: STAGES["single_bmm"](*inputs, 1.0)).peak_bytes
    kv_bytes = 2 * 5000 * 4 * 256 * 4
    caches = 2 * (313 + 1) * 16 * 4 * 256 * 4  # in whole blocks, and one to spare
    assert memory.needed_bytes(workload, [5000]) == (caches + kv_bytes + peak, "single_bmm")
    assert peak > 6 * kv_bytes  # K and V of every query head


def test_by_default_the_contexts_that_fit_and_it_says_why_others_do_not(run, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 30_000_000)
    status, text, _ = run("--stages", "single_bmm,gqa_broadcast,paged_attention")
    assert status == 0
    assert [entry["context"] for entry in written()["contexts"]] == [1024, 8192]
    line, other, *_ = text.splitlines()
    assert line.startswith("Left out: 32,768 tokens, which needs ")
    assert line.endswith("most of it for single_bmm; 24.0 MB usable (80% of what is free).")
    assert other.startswith("Left out: 100,000 tokens")


@quick
def test_a_machine_too_small_for_1024_tokens_is_told_so(run, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 50_000)
    status, text, errors = run()
    assert (status, text, files_under(tmp_path)) == (2, "", [])
    assert "--context 1024 needs" in errors.splitlines()[-1]


@quick
def test_a_context_that_only_its_stages_make_too_long_is_refused(run, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000_000)
    status, text, errors = run("--stages", "single_bmm", "--context", "9000")
    assert (status, text) == (2, "")
    assert re.fullmatch(
        r"python -m paged_attention: --context 9000 needs [\d.]+ MB, most of it for single_bmm; "
        r"8.00 MB usable \(80% of what is free\)\n",
        errors,
    )


# -- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_measured(run, monkeypatch):
    def interrupted(inputs):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal was lost")

    replace_stage(monkeypatch, "single_bmm", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status, text, errors = run("--context", "40,60,80")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert status == 130
    assert errors.splitlines()[-1] == "Interrupted: the table and the JSON hold what was measured."
    assert files_under(Path("figures/local")) == ["ladder.json", "ladder.png"]
    data = written()
    assert data["interrupted"] is True
    (entry,) = data["contexts"]
    assert [stage["name"] for stage in entry["stages"]] == ["naive_loops", "batched_gather"]
    assert all(stage["samples"] for stage in entry["stages"])
    assert table.table(entry) in text


def interrupt_at(context, monkeypatch):
    measure = ladder.measure_step

    def measure_step(settings, seq_lens, *others):
        if seq_lens == [context]:
            raise KeyboardInterrupt
        measure(settings, seq_lens, *others)

    monkeypatch.setattr(ladder, "measure_step", measure_step)


@quick
def test_ctrl_c_before_anything_is_measured_writes_nothing(run, monkeypatch, tmp_path):
    interrupt_at(40, monkeypatch)
    status, _, errors = run("--context", "40")
    assert status == 130
    assert errors.splitlines()[-1] == "Interrupted before anything was measured."
    assert files_under(tmp_path) == []


def test_ctrl_c_in_a_later_context_keeps_the_earlier_ones(run, monkeypatch):
    interrupt_at(60, monkeypatch)
    assert run("--context", "40,60,80", "--stages", "single_bmm")[0] == 130
    assert [entry["context"] for entry in written()["contexts"]] == [40]
    assert written()["interrupted"] is True


# -- numbers and files ----------------------------------------------------------------------------


@quick
def test_seconds_and_bytes_have_three_digits_and_a_unit():
    seconds = {0.4e-6: "0.40 us", 999.4e-6: "999 us", 999.6e-6: "1.00 ms", 1.2345: "1.23 s"}
    seconds |= {87.06e-6: "87.1 us", 0.01234: "12.3 ms", 123.4: "123 s", 1234.5: "1234 s"}
    assert {value: units.human_seconds(value) for value in seconds} == seconds
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 819_200_000: "819 MB", 2.5e15: "2500 TB"}
    sizes |= {999_600_000: "1.00 GB", 7_415_305_808: "7.42 GB"}
    assert {value: units.human_bytes(value) for value in sizes} == sizes


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
    settings, contexts, _, out = arguments.parse([])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert settings == Settings(device, 24, 4, 256, 16, torch.float32, 512, LADDER, ())
    assert (contexts, out) == (None, Path("figures/local"))
    assert cli.LENGTHS == (1024, 8192, 32_768, 100_000)
    assert LADDER == (*STAGES, "paged_attention")


@quick
def test_a_failure_names_no_path_of_the_machine():
    def fails():
        raise OSError("can't open /some/where/lib.so: no such file")

    failed = contender.tried("single_bmm", fails, Settings())
    assert failed.as_json()["failure"] == "OSError: can't open lib.so: no such file"
    assert failed.outcome() == "failure: OSError: can't open lib.so: no such file"
