"""What V2 leaves in its scratch tensors, whatever their dtype and the partition size, and how
fp8 caches and their scales show in it."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_close, assert_same, oracle, rounding
from pools import Dense, paged, random
from vllm_calls import LENS, OPERATIONS, arguments, each_version, run, run_v2, scratch_for, step

from paged_attention import Workspace, plan_decode
from paged_attention.vllm.states import merge_attn_states, write_states


def states_of(dense, size, scale=None, slopes=None):
    """(sequence, partition, exp_sum, max_logit, output) of each, (num_heads, ...), float64."""
    scale = dense.query.shape[2] ** -0.5 if scale is None else scale
    for b, (key, value) in enumerate(zip(dense.keys, dense.values)):
        tokens, num_kv_heads, _ = key.shape
        group = dense.query.shape[1] // num_kv_heads
        for first in range(0, tokens, size):
            part = slice(first, min(first + size, tokens))
            k = key[part].double().repeat_interleave(group, dim=1)
            v = value[part].double().repeat_interleave(group, dim=1)
            logits = torch.einsum("hd,thd->ht", dense.query[b].double(), k) * scale
            if slopes is not None:
                distance = torch.arange(part.start, part.stop) - (tokens - 1)
                logits = logits + slopes.double()[:, None] * distance
            m = logits.amax(1)
            weights = torch.exp(logits - m[:, None])
            s = weights.sum(1)
            yield b, first // size, s, m, torch.einsum("ht,thd->hd", weights, v) / s[:, None]


def assert_holds_states(scratch, dense, size, scale=None, slopes=None):
    """Judge each partition's state. Returns how many there are."""
    states, extra = list(states_of(dense, size, scale, slopes)), 2 * rounding(dense, scale)
    for b, p, *state in states:
        for name, right in zip(("exp_sum", "max_logits", "tmp_out"), state):
            assert_close(getattr(scratch, name)[b, :, p], right, extra=extra, what=name)
    return len(states)


def merged_by_vllms_rule(scratch, lens, size):
    """What vLLM's second kernel makes of the scratch, reading nothing past a sequence's end."""
    out = torch.zeros(*scratch.tmp_out.shape[:2], scratch.tmp_out.shape[3], dtype=torch.float64)
    for b, tokens in enumerate(lens):
        live = -(-tokens // size)
        if live:
            m, s, tmp_out = (
                tensor[b, :, :live].double()
                for tensor in (scratch.max_logits, scratch.exp_sum, scratch.tmp_out)
            )
            weights = s * torch.exp(m - m.amax(1, keepdim=True))
            weights = weights / weights.sum(1, keepdim=True)
            out[b] = torch.einsum("hp,hpd->hd", weights, tmp_out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_holds_each_partitions_sum_max_and_normalised_output(dtype):
    dense, given = step(head_size=48, sharp=3.0, dtype=dtype)
    slopes = torch.linspace(-0.01, 0.02, 6)
    out, scratch = run_v2(given | {"scale": 0.3, "alibi_slopes": slopes}, 3)
    assert assert_holds_states(scratch, dense, 512, 0.3, slopes) == 3 + 0 + 1 + 2
    extra = 2 * rounding(dense, 0.3) + (0.01 if dtype != torch.float32 else 0)
    assert_close(out, merged_by_vllms_rule(scratch, LENS, 512), dtype=dtype, extra=extra)


def past_the_end(lens, partitions, size):
    starts = torch.arange(partitions) * size
    unused = starts >= torch.tensor(lens)[:, None]
    return unused[:, None].expand(len(lens), 6, partitions)


def test_scratch_past_a_sequences_end_is_neither_read_nor_written():
    out, scratch = run_v2(step(head_size=48)[1], 5)  # two more than max_seq_len takes
    unused = past_the_end(LENS, 5, 512)
    assert unused.sum() == 6 * (20 - 6)
    for tensor in scratch:
        assert tensor[unused].isnan().all() and not tensor[~unused].isnan().any()
    assert not out.isnan().any()


def test_out_has_the_same_bits_whatever_dtype_tmp_out_has():
    _, given = step(head_size=48, sharp=3.0, dtype=torch.float16)
    assert_same(*(run_v2(given, 3, dtype)[0] for dtype in (torch.float16, torch.float32)))


def test_pub_22_partial_outputs_are_not_rounded_before_the_merge(monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", "16")
    values = torch.ones(48, 1, 16, dtype=torch.float16)
    values[0:9] = values[16:25] = 1.0009765625
    dense = Dense(torch.zeros(1, 1, 16, dtype=torch.float16), [torch.zeros_like(values)], [values])
    given = arguments(dense, paged(dense, 16, "vllm"))
    for dtype in (torch.float16, torch.float32):
        assert run_v2(given, 3, dtype)[0].eq(1.0).all()


def test_a_capacity_plans_states_are_those_of_an_exact_plan():
    """The plan that a device with lengths of its own gets, here on the CPU."""
    dense = random(LENS, 6, 2, 48, sharp=3.0)
    pool = paged(dense, 16, "vllm")
    _, exact = run_v2(arguments(dense, pool), 3)
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_size": 48, "block_size": 16}
    capacity = {"num_seqs": 4, "max_seq_len": 1056, "partition_size": 512}
    plan, workspace = plan_decode(**sizes, layout="vllm", **capacity), Workspace()
    plan.run(dense.query, *pool, workspace=workspace)
    scratch, unused = scratch_for(dense.query, 3), past_the_end(LENS, 3, 512)
    write_states(plan, workspace, pool.seq_lens, 1.0, scratch)
    for ours, theirs in zip(scratch, exact):
        assert ours[unused].isnan().all()
        assert_close(ours[~unused], theirs[~unused].double(), extra=4e-6)


def test_partitions_have_the_size_that_the_environment_gives(monkeypatch):
    dense, given = step([100, 37])
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", "40")  # three blocks of 16
    out, scratch = run_v2(given, 3)
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    assert assert_holds_states(scratch, dense, 48) == 3 + 1


@each_version
def test_pub_12_a_sink_merged_with_the_operations_result_is_counted_once(version, monkeypatch):
    """The operation knows no sinks: one is a state of its own, (0, sink), merged last."""
    ones = Dense(torch.zeros(1, 1, 16), [torch.zeros(12, 1, 16)], [torch.ones(12, 1, 16)])
    given, sink = arguments(ones, paged(ones, 4, "vllm")), torch.full((1, 1), math.log(4))
    for size in (4, 8, 12):
        monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", str(size))
        scratch = scratch_for(ones.query, -(-12 // size))
        out, lse = run(version, given, scratch), torch.full((1, 1), math.log(12))
        if version == "v2":
            lse = (scratch.max_logits + scratch.exp_sum.log()).logsumexp(-1)
            assert_close(lse, math.log(12))
        merge_attn_states(out, out.clone(), lse.t(), torch.zeros_like(out), sink, lse)
        assert_close(out, 0.75)
        assert_close(lse, 2.7725887)


# -- fp8


def fp8_pool(keys, values, dtype):
    """Dense bytes-to-be in a pool of uint8: what isn't used holds 0x7F, a NaN."""
    as_bytes = ([x.to(dtype).view(torch.uint8) for x in tensors] for tensors in (keys, values))
    query = torch.zeros(len(keys), 1, keys[0].shape[2])
    return paged(Dense(query, *as_bytes), 16, "vllm", poison=(0x7F, 0x7F))


@each_version
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    "k_scale, v_scale", [(0.5, torch.tensor(1.5)), (1.0, torch.tensor([0.5, 3.0]))]
)
def test_fp8_caches_are_bytes_with_a_scale_each(version, name, k_scale, v_scale):
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    dense, scratch = random(LENS, 6, 2, 32, sharp=2.0), scratch_for(torch.empty(4, 6, 32), 3)
    keys = [k.to(dtype).float() * k_scale for k in dense.keys]
    values = [v.to(dtype).float() * v_scale.view(-1, 1) for v in dense.values]
    stored = Dense(dense.query, keys, values)
    scales = {"kv_cache_dtype": name, "k_scale": k_scale, "v_scale": v_scale}
    pool = fp8_pool(dense.keys, dense.values, dtype)
    out = run(version, arguments(dense, pool, **scales), scratch)
    assert_close(out, oracle(*stored)[0], extra=rounding(stored))
    assert version == "v1" or assert_holds_states(scratch, stored, 512) == 6


@each_version
@pytest.mark.parametrize("form", [float, torch.tensor, lambda x: torch.tensor([x])])
def test_pub_19_fp8_scales_count_in_every_form_of_a_call(version, form):
    keys, values = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    keys[0], values[0] = 1.0, 4.0
    dense = Dense(torch.ones(1, 1, 16), [keys], [values])
    scales = {"kv_cache_dtype": "fp8", "k_scale": form(0.25), "v_scale": form(0.5)}
    pool = fp8_pool([keys], [values], torch.float8_e4m3fn)
    given, scratch = arguments(dense, pool, 1 / 16, **scales), scratch_for(dense.query, 1)
    out = run(version, given, scratch)
    assert_close(out, 1.1243530)
    by_name = torch.empty_like(out)
    OPERATIONS[version](**(scratch._asdict() if version == "v2" else {}), **given, out=by_name)
    assert_same(by_name, out)
    if version == "v2":
        assert_close(scratch.max_logits + scratch.exp_sum.log(), 0.8259394)


# -- what isn't served


def test_a_scratch_too_small_for_the_partition_size_is_refused(monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", "256")
    _, given = step()
    for name, tensor in scratch_for(given["query"], 5)._asdict().items():
        scratch = scratch_for(given["query"], 5)._replace(**{name: tensor[:, :, :4]})
        with pytest.raises(ValueError, match=f"{name} must be .*room for the 5 partitions of 256"):
            run("v2", given, scratch)


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        ("exp_sum", torch.zeros(1, 2, 1, dtype=torch.float64), "float32"),
        ("exp_sum", torch.zeros(1, 2, 1, device="meta"), "on cpu"),
        ("max_logits", torch.zeros(1, 3, 1), r"\(1, 2, 1\)"),
        ("max_logits", None, "a tensor"),
        ("tmp_out", torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16), ".*float16"),
        ("tmp_out", torch.zeros(1, 2, 1, 32, dtype=torch.float16), r"\(1, 2, 1, 16\)"),
    ],
)
def test_scratch_of_another_kind_is_refused(name, tensor, words):
    _, given = step([40], 2, 1, 16, dtype=torch.float16)
    scratch = scratch_for(given["query"], 1)._replace(**{name: tensor})
    with pytest.raises((TypeError, ValueError), match=f"{name} must be {words}"):
        run("v2", given, scratch)
