"""Peers get the ladder's data, give the reference's answer, or say why they can't."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from paged_attention import plan_decode
from paged_attention.bench import contender, ladder, memory, peers, predictions
from paged_attention.bench.contender import TOLERANCES
from paged_attention.bench.peers import vllm_cpu
from paged_attention.bench.peers.ours import KernelCall
from paged_attention.bench.predictions import predictions_here
from paged_attention.bench.settings import RAGGED_PEERS, Settings
from paged_attention.cost.predict import Shape, predict
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import PROFILES

quick = pytest.mark.quick
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32}
UNCOMPILED = [name for name, peer in peers.PEERS.items() if not peer.compiled]


def batch_of(*lengths, dtype=torch.float32, **sizes):
    """(the batch, the float64 answer): blocks in random order, unused slots and a block NaN."""
    settings = Settings(dtype=dtype, **{**SIZES, **sizes})
    inputs = settings.inputs(lengths)
    return peers.Batch(inputs, settings.scale), ladder.expected_of(inputs, settings)


def made(name, batch):
    try:
        return peers.make(name, batch)
    except peers.Unavailable as reason:
        pytest.skip(f"{name}: {reason}")


def assert_right(name, *lengths, dtype=torch.float32, **sizes):
    """What the peer gives twice, as nothing is used up; returns its call and the note."""
    batch, expected = batch_of(*lengths, dtype=dtype, **sizes)
    call, note = made(name, batch)
    for out in (call(), call()):
        assert out.shape == expected.shape and out.dtype == dtype
        allowed = TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
        assert (out.double() - expected).abs().max().item() <= allowed
    return call, note


# -- right ----------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("tokens", [1, 15, 16, 333])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_a_peer_gives_the_references_answer_whatever_unused_slots_hold(name, tokens):
    assert_right(name, tokens)


@quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_a_peer_serves_the_ladders_dtypes(name, dtype):
    assert_right(name, 77, dtype=dtype)


@pytest.mark.slow
def test_flex_attention_gives_the_references_answer_under_a_counter_too():
    call, note = assert_right("flex_paged", 77)
    assert count(call).ops == 0  # nothing to count in compiled code, and no error
    assert note.startswith("compiled in")


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllms_operation_gives_the_references_answer(dtype, block_size):
    _, note = assert_right("vllm_cpu_op", 333, dtype=dtype, block_size=block_size)
    assert note


@quick
def test_the_dense_copy_is_made_beforehand_and_the_gathered_one_in_the_call():
    batch, _ = batch_of(160)
    kv_bytes = 2 * 160 * 2 * 32 * 4
    assert count(made("gather_sdpa", batch)[0]).peak_bytes > kv_bytes
    by_op = count(made("dense_sdpa", batch)[0]).by_op
    assert not {"index_select", "clone", "index"} & set(by_op)


@quick
@pytest.mark.parametrize("name", RAGGED_PEERS)
def test_a_peer_of_a_ragged_batch_gives_the_references_answer(name):
    assert_right(name, 40, 1, 333, 16)


@quick
def test_our_own_kernel_is_called_as_any_user_calls_it():
    batch, _ = batch_of(40)
    for name in ("paged_attention_HND", "paged_attention_NHD"):
        assert made(name, batch)[0].options.keys() == {"layout", "scale"}


# -- skipped --------------------------------------------------------------------------------------


def refusal(name, *lengths, **sizes):
    with pytest.raises(peers.Unavailable) as reason:
        peers.make(name, batch_of(*(lengths or (20,)), **sizes)[0])
    return str(reason.value)


@quick
@pytest.mark.parametrize("name", ["dense_sdpa", "flex_paged"])
def test_a_peer_for_one_sequence_says_so(name):
    assert refusal(name, 3, 4) == "takes one sequence, not 2"


@quick
@pytest.mark.parametrize("name", ["gather_sdpa", "dense_sdpa"])
def test_an_sdpa_without_grouped_heads_is_skipped(name, monkeypatch):
    def of_torch_2_1(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None
    ):
        raise AssertionError("not called without enable_gqa")

    monkeypatch.setattr(functional, "scaled_dot_product_attention", of_torch_2_1)
    assert refusal(name) == "SDPA has enable_gqa from torch 2.5 on"


@quick
def test_a_torch_without_paging_of_its_own_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.experimental._paged_attention", None)
    assert refusal("flex_paged") == f"torch {torch.__version__} has no PagedAttention"


def test_what_does_not_compile_is_skipped_in_a_few_words(monkeypatch):
    pytest.importorskip("torch.nn.attention.experimental._paged_attention")

    def compiled(fn, **options):
        def call(*arguments, **named):
            raise RuntimeError("No working C++ compiler " + 40 * "found in places, " + "\nmore")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    reason = refusal("flex_paged")
    assert reason.startswith("RuntimeError: No working C++ compiler") and len(reason) <= 100
    assert "\n" not in reason


@quick
def test_a_reason_names_no_path_of_the_machine(monkeypatch):
    def fails(batch):
        raise OSError("can't run '/some/where/g++' or /some/where/clang: 3/4 tried")

    broken = peers.PEERS["dense_sdpa"]._replace(make=fails)
    monkeypatch.setitem(peers.PEERS, "dense_sdpa", broken)
    assert refusal("dense_sdpa") == "OSError: can't run 'g++' or clang: 3/4 tried"


@quick
def test_a_size_that_vllms_operation_lacks_is_never_passed_to_it():
    assert refusal("vllm_cpu_op", head_size=48) == "no kernel for head size 48"
    assert refusal("vllm_cpu_op", block_size=8) == "no kernel for block size 8"


@pytest.fixture
def vllm_at(tmp_path, monkeypatch):
    """An installed package vllm that holds what the test puts into this folder."""
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(vllm_cpu, "_is_registered", lambda: False)  # even if it is, by now
    monkeypatch.setattr(vllm_cpu.util, "find_spec", {"vllm": spec}.get)
    monkeypatch.setattr(vllm_cpu, "cpu_capability", lambda: "AVX2")
    vllm_cpu._load.cache_clear()
    yield tmp_path
    vllm_cpu._load.cache_clear()


def test_without_a_library_for_this_machine_vllms_operation_is_skipped(vllm_at, monkeypatch):
    assert refusal("vllm_cpu_op") == "the installed vllm has no _C_AVX2.abi3.so"
    monkeypatch.setattr(vllm_cpu, "cpu_capability", lambda: "DEFAULT")
    assert refusal("vllm_cpu_op") == "vllm-cpu has nothing for DEFAULT"
    monkeypatch.setattr(vllm_cpu.util, "find_spec", lambda name: None)
    assert refusal("vllm_cpu_op") == "vllm-cpu is not installed"


def test_a_library_is_tried_in_another_process_before_it_can_break_this_one(vllm_at, monkeypatch):
    def never(path):
        raise AssertionError("loaded here")

    (vllm_at / "_C_AVX2.abi3.so").write_bytes(b"of another PyTorch")
    monkeypatch.setattr(torch.ops, "load_library", never)
    reason = f"torch {torch.__version__} can't load _C_AVX2.abi3.so"
    assert refusal("vllm_cpu_op") == reason

    def hangs(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(vllm_cpu.subprocess, "run", hangs)
    assert refusal("vllm_cpu_op") == reason


# -- memory and predictions -----------------------------------------------------------------------


@quick
def test_what_a_context_needs_counts_every_copy_that_peers_keep():
    alone = Settings(stages=("single_bmm", "paged_attention"))
    settings = replace(alone, peers=tuple(peers.PEERS))
    needed, largest = memory.needed_bytes(settings, (5000,))
    cache = 2 * (313 + 1) * 16 * 4 * 256 * 4
    # HND, NHD, dense, FlexAttention's, vLLM's
    assert needed - memory.needed_bytes(alone, (5000,))[0] >= 5 * cache
    assert largest in (*settings.stages, *settings.peers)


@quick
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_a_peer_holds_on_to_is_what_it_declares(name):
    batch, _ = batch_of(320)
    cache = sum(tensor.nbytes for tensor in batch.hnd)
    kept = []
    peak = count(lambda: kept.append(made(name, batch))).peak_bytes
    peer = peers.PEERS[name]
    assert peak <= (peer.kept + max(peer.making, 1)) * cache


@quick
def test_what_a_context_needs_is_what_is_counted(monkeypatch):
    """By the cost model for ours, on meta tensors for the others."""
    alone = Settings(stages=("paged_attention",))
    caches = 2 * (63 + 1) * 16 * 4 * 256 * 4
    needed, _ = memory.needed_bytes(alone, (1000,))
    peak = count(KernelCall(alone.inputs([1000]), layout="vllm")).peak_bytes
    assert needed == caches + alone.kv_bytes(1000) + max(peak, 48 * 1000 * 256)
    on_a_gpu = replace(alone, device="cuda")
    monkeypatch.setattr(memory, "profile_of", lambda device: PROFILES["H200"])
    a_gpus_wave = memory._predicted_peak(on_a_gpu, "paged_attention", (100_000,))
    assert peak < 100_000_000 < a_gpus_wave < 160_000_000


def band(name, shape, profile):
    seconds = predict(name, shape, profile).seconds
    return pytest.approx([seconds.low, seconds.high], abs=1e-9)


@quick
def test_predictions_are_the_cost_models_for_published_profiles():
    settings = Settings(stages=("single_bmm", "paged_attention"), dtype=torch.float16)
    predicted = predictions.predictions(settings, [4000])
    assert set(predicted) == {"BI-V100", "H200"}
    for device, bands in predicted.items():
        rates = PROFILES[device].bandwidth.high, PROFILES[device].bandwidth.low
        kv_bytes = 2 * 4000 * 4 * 256 * 2
        assert bands["floor"] == pytest.approx([kv_bytes / rate for rate in rates], rel=1e-3)
        for name, partition_size in (("single_bmm", 512), ("paged_attention", None)):
            shape = Shape([4000], dtype=torch.float16, partition_size=partition_size)
            assert bands[name] == band(name, shape, PROFILES[device])
            assert 0 < bands[name][0] <= bands[name][1]


@quick
def test_predictions_for_this_device_are_the_calibrated_profiles_in_each_layout():
    settings = Settings(stages=("single_bmm",), peers=("paged_attention_NHD", "gather_sdpa"))
    bands = predictions_here(settings, [4000, 3], PROFILES["H200"])
    shape = Shape([4000, 3], layout="NHD")
    assert list(bands) == ["single_bmm", "paged_attention_NHD"]
    assert bands["paged_attention_NHD"] == band("paged_attention", shape, PROFILES["H200"])


@quick
def test_published_rows_are_those_of_as_much_work_for_each_kv_head():
    rows = predictions.published(Settings(), [100_000])
    assert [row["us"] for row in rows] == [18660.4, 9257.6, 6769.8]
    assert {(r["num_heads"], r["num_kv_heads"], r["head_size"]) for r in rows} == {(6, 1, 256)}
    for other in (Settings(head_size=128), Settings(num_heads=28)):
        assert predictions.published(other, [100_000]) == []
    assert predictions.published(Settings(), [100_000, 5]) == []
    assert predictions.published(Settings(), [100_001]) == []


@quick
def test_the_device_that_is_measured_is_not_predicted(monkeypatch):
    monkeypatch.setattr(predictions, "device_slug", lambda device: "h200")
    assert set(predictions.predictions(Settings(), [1000])) == {"BI-V100"}


def test_the_kernels_peak_in_the_ladder_is_a_first_calls_the_workspace_included(monkeypatch):
    monkeypatch.setattr(contender, "MOST_ROUNDS", 3)
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16}
    settings = Settings(stages=("paged_attention",), peers=("paged_attention_HND",), **shape)
    kept = []
    ladder.measure_step(settings, [5000], PROFILES["H200"], kept)
    [step] = kept
    for layout, [result] in (("vllm", step["stages"]), ("HND", step["peers"])):
        plan = plan_decode(**shape, block_size=16, layout=layout, seq_lens=[5000])
        assert 0 <= result["peak_bytes"] - plan.workspace_bytes < 200_000
        cost = predict("paged_attention", Shape([5000], layout=layout, **shape))
        assert result["peak_bytes"] == cost.temporary_bytes
