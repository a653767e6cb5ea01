"""vLLM's operations, called as vLLM calls them: right numbers, vLLM's meaning of every scratch
tensor, and an error by name for what isn't served."""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import (
    INF,
    NAN,
    Dense,
    assert_close,
    assert_same,
    empty_caches,
    generated,
    oracle,
    paged,
    random,
    rounding,
    store,
    to,
)

from paged_attention import DecodePlan, Workspace, plan_decode
from paged_attention.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_attention.vllm.choice import takes_v2, upstream_takes_v2
from paged_attention.vllm.states import Scratch, merge_attn_states, write_states
from paged_attention.vllm.writes import reshape_and_cache

LENS = [1030, 0, 17, 600]
VERSIONS = ("v1", "v2")
each_version = pytest.mark.parametrize("version", VERSIONS)


def scratch_for(query, partitions, dtype=None):
    """exp_sum, max_logits, tmp_out, full of NaN."""
    shape = (*query.shape[:2], partitions)
    tmp_out = torch.full((*shape, query.shape[2]), NAN, dtype=dtype or query.dtype)
    return torch.full(shape, NAN), torch.full(shape, NAN), tmp_out


def arguments(dense, pool, scale=None, max_seq_len=None, slopes=None, **changed):
    """V1's arguments after `out`, by vLLM's names and in its order, as 0.5.3 to 0.12 pass them."""
    given = {
        "query": dense.query,
        "key_cache": pool.key_cache,
        "value_cache": pool.value_cache,
        "num_kv_heads": pool.value_cache.shape[1],
        "scale": dense.query.shape[2] ** -0.5 if scale is None else scale,
        "block_tables": pool.block_tables,
        "seq_lens": pool.seq_lens,
        "block_size": pool.value_cache.shape[3],
        "max_seq_len": int(pool.seq_lens.max()) if max_seq_len is None else max_seq_len,
        "alibi_slopes": slopes,
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
        "tp_rank": 0,
        "blocksparse_local_blocks": 0,
        "blocksparse_vert_stride": 0,
        "blocksparse_block_size": 64,
        "blocksparse_head_sliding_step": 0,
    }
    return given | changed


def call(version, given, count=None):
    """out, from the first `count` arguments by position."""
    query = given["query"]
    out = torch.full_like(query, NAN)
    if version == "v1":
        paged_attention_v1(out, *list(given.values())[:count])
    else:
        scratch = scratch_for(query, -(-given["max_seq_len"] // 512))
        paged_attention_v2(out, *scratch, *list(given.values())[:count])
    return out


# -- numbers


@each_version
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size, head_size", [(16, 48), (8, 264), (3, 16)])
def test_a_ragged_batch_matches_the_oracle(version, dtype, block_size, head_size):
    dense = random(LENS, 6, 2, head_size, sharp=3.0, dtype=dtype)
    out = call(version, arguments(dense, paged(dense, block_size, "vllm"), max_seq_len=1111))
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))


@each_version
def test_alibi_slopes_bias_by_the_distance_from_the_newest_token(version):
    dense = random(LENS, 6, 2, 32, sharp=3.0)
    slopes = torch.tensor([0.0, 0.5, 0.25, -0.125, 1.0, 0.03])
    out = call(version, arguments(dense, paged(dense, 16, "vllm"), slopes=slopes))
    assert_close(out, oracle(*dense, slopes=slopes)[0], extra=rounding(dense))


@each_version
def test_a_batch_of_nothing_is_served(version):
    none = random([], 6, 2, 32)
    empty = empty_caches(4, 16, 2, 32, "vllm", torch.float32)
    pool = paged(none, 16, "vllm", num_blocks=4)._replace(key_cache=empty[0], value_cache=empty[1])
    assert call(version, arguments(none, pool, max_seq_len=0)).shape == (0, 6, 32)
    zeros = random([0, 0], 6, 2, 32)
    out = call(version, arguments(zeros, paged(zeros, 16, "vllm"), max_seq_len=0))
    assert out.eq(0).all()


@each_version
def test_out_may_be_float32_and_a_strided_view(version):
    dense = random(LENS, 6, 2, 32, dtype=torch.float16)
    given = arguments(dense, paged(dense, 16, "vllm"))
    wide = torch.full((4, 12, 32), NAN)
    out = wide[:, ::2]
    if version == "v1":
        paged_attention_v1(out, *given.values())
    else:
        paged_attention_v2(out, *scratch_for(dense.query, 3, torch.float32), *given.values())
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    assert wide[:, 1::2].isnan().all()


# -- what V2 leaves behind


def states_of(dense, size, scale, slopes=None):
    """(sequence, partition, exp_sum, max_logit, output) of each, (num_heads, ...), float64."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_holds_each_partitions_sum_max_and_normalised_output(dtype):
    dense = random(LENS, 6, 2, 48, sharp=3.0, dtype=dtype)
    slopes = torch.linspace(-0.01, 0.02, 6)
    given = arguments(dense, paged(dense, 16, "vllm"), scale=0.3, slopes=slopes)
    exp_sum, max_logits, tmp_out = scratch_for(dense.query, 3)
    out = torch.full_like(dense.query, NAN)
    paged_attention_v2(out, exp_sum, max_logits, tmp_out, *given.values())
    extra, judged = 2 * rounding(dense, 0.3), 0
    for b, p, s, m, attention in states_of(dense, 512, 0.3, slopes):
        assert_close(exp_sum[b, :, p], s, extra=extra, what="exp_sum")
        assert_close(max_logits[b, :, p], m, extra=extra, what="max_logits")
        assert_close(tmp_out[b, :, p], attention, dtype=dtype, extra=extra, what="tmp_out")
        judged += 1
    assert judged == 3 + 0 + 1 + 2
    merged = merged_by_vllms_rule(exp_sum, max_logits, tmp_out, LENS, 512)
    assert_close(out, merged, dtype=dtype, extra=extra + (0.01 if dtype != torch.float32 else 0))


def merged_by_vllms_rule(exp_sum, max_logits, tmp_out, lens, size):
    """What vLLM's second kernel makes of the scratch, reading nothing past a sequence's end."""
    out = torch.zeros(*tmp_out.shape[:2], tmp_out.shape[3], dtype=torch.float64)
    for b, tokens in enumerate(lens):
        live = -(-tokens // size)
        if live:
            m, s = max_logits[b, :, :live].double(), exp_sum[b, :, :live].double()
            weights = s * torch.exp(m - m.amax(1, keepdim=True))
            weights = weights / weights.sum(1, keepdim=True)
            out[b] = torch.einsum("hp,hpd->hd", weights, tmp_out[b, :, :live].double())
    return out


def past_the_end(lens, partitions, size):
    starts = torch.arange(partitions) * size
    return (starts >= torch.tensor(lens)[:, None])[:, None]  # (num_seqs, 1, partitions)


def test_scratch_past_a_sequences_end_is_neither_read_nor_written():
    dense = random(LENS, 6, 2, 48)
    scratch = scratch_for(dense.query, 5)  # two more than max_seq_len takes
    out = torch.empty_like(dense.query)
    paged_attention_v2(out, *scratch, *arguments(dense, paged(dense, 16, "vllm")).values())
    unused = past_the_end(LENS, 5, 512).expand(4, 6, 5)
    assert unused.sum() == 6 * (20 - 6)
    for tensor in scratch:
        assert tensor[unused].isnan().all() and not tensor[~unused].isnan().any()
    assert not out.isnan().any()


def test_out_has_the_same_bits_whatever_dtype_tmp_out_has():
    dense = random(LENS, 6, 2, 48, sharp=3.0, dtype=torch.float16)
    given = arguments(dense, paged(dense, 16, "vllm"))
    outs = []
    for dtype in (torch.float16, torch.float32):
        outs.append(torch.full_like(dense.query, NAN))
        paged_attention_v2(outs[-1], *scratch_for(dense.query, 3, dtype), *given.values())
    assert_same(*outs)


def test_a_capacity_plans_states_are_those_of_an_exact_plan():
    """The plan that a device with lengths of its own gets, here on the CPU."""
    dense = random(LENS, 6, 2, 48, sharp=3.0)
    pool = paged(dense, 16, "vllm")
    exact = scratch_for(dense.query, 3)
    given = arguments(dense, pool)
    paged_attention_v2(torch.empty_like(dense.query), *exact, *given.values())

    plan = plan_decode(
        num_heads=6,
        num_kv_heads=2,
        head_size=48,
        block_size=16,
        layout="vllm",
        num_seqs=4,
        max_seq_len=1056,
        partition_size=512,
    )
    workspace, scratch = Workspace(), scratch_for(dense.query, 3)
    plan.run(dense.query, *pool, workspace=workspace)
    write_states(plan, workspace, pool.seq_lens, 1.0, Scratch(*scratch))
    unused = past_the_end(LENS, 3, 512).expand(4, 6, 3)
    for ours, theirs in zip(scratch, exact):
        assert ours[unused].isnan().all()
        assert_close(ours[~unused], theirs[~unused].double(), extra=4e-6)


@each_version
def test_lengths_on_a_device_are_never_read_back(version, monkeypatch):
    """On meta any read of a value raises; and one plan serves all layers of many steps."""
    made = []
    init = DecodePlan.__init__
    monkeypatch.setattr(DecodePlan, "__init__", lambda *a, **k: (made.append(a), init(*a, **k))[1])
    pool = [torch.empty(n, device="meta") for n in ((9, 2, 12, 16, 4), (9, 2, 48, 16))]
    tables = torch.empty(3, 80, dtype=torch.int32, device="meta")
    lens = torch.empty(3, dtype=torch.int32, device="meta")
    query = torch.empty(3, 6, 48, device="meta")
    scratch = [t.to("meta") for t in scratch_for(query, 3)] if version == "v2" else []
    served = paged_attention_v2 if version == "v2" else paged_attention_v1
    for max_seq_len in (1031, 1031, 1032):
        rest = (2, 0.1, tables, lens, 16, max_seq_len, None, "auto", 1.0, 1.0)
        served(torch.empty_like(query), *scratch, query, *pool, *rest)
    assert len(made) <= 1


# -- the forms of a call


@each_version
def test_the_parameters_have_vllms_names_and_order(version):
    served = paged_attention_v1 if version == "v1" else paged_attention_v2
    dense = random([3], 2, 1, 16)
    before = ["out"] if version == "v1" else ["out", "exp_sum", "max_logits", "tmp_out"]
    names = list(arguments(dense, paged(dense, 16, "vllm")))
    assert list(inspect.signature(served).parameters) == before + names


@each_version
def test_eleven_positional_arguments_are_enough(version):
    """CoreX's vLLM 0.6.3 ends with alibi_slopes; kv_cache_dtype may follow as None."""
    dense = random(LENS, 6, 2, 32)
    given = arguments(dense, paged(dense, 16, "vllm"), kv_cache_dtype=None)
    whole = call(version, given | {"kv_cache_dtype": "auto"})
    assert_same(call(version, given, 10), whole)
    assert_same(call(version, given, 11), whole)


@each_version
@pytest.mark.parametrize("scales", [(3.0, 5.0), (torch.tensor(NAN), torch.tensor(NAN))])
def test_scales_are_ignored_for_caches_that_describe_themselves(version, scales):
    dense = random(LENS, 6, 2, 32)
    given = arguments(dense, paged(dense, 16, "vllm"))
    scaled = call(version, given | dict(zip(("k_scale", "v_scale"), scales)))
    assert_same(scaled, call(version, given))


@each_version
def test_the_single_kv_scale_of_old_is_recognised(version):
    dense = random([5], 2, 1, 16)
    given = arguments(dense, paged(dense, 16, "vllm"))
    for old in (
        given | {"k_scale": 1.0, "v_scale": 0},  # kv_scale, tp_rank
        given | {"k_scale": 1.0, "v_scale": None},  # kv_scale alone
    ):
        with pytest.raises(TypeError, match=r"v_scale.*before 0\.5\.3"):
            call(version, old)


def fp8_pool(keys, values, dtype, block_size=16):
    """Dense bytes-to-be in a pool of uint8: what isn't used holds 0x7F, a NaN."""
    dense = Dense(torch.zeros(len(keys), 1, keys[0].shape[2]), keys, values)
    as_bytes = Dense(
        dense.query,
        [k.to(dtype).view(torch.uint8) for k in keys],
        [v.to(dtype).view(torch.uint8) for v in values],
    )
    return paged(as_bytes, block_size, "vllm", poison=(0x7F, 0x7F))


@each_version
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches_are_bytes_with_a_scale_each(version, name):
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    dense = random(LENS, 6, 2, 32, sharp=2.0)
    pool = fp8_pool(dense.keys, dense.values, dtype)
    keys = [k.to(dtype).float() * 0.5 for k in dense.keys]
    values = [v.to(dtype).float() * 1.5 for v in dense.values]
    given = arguments(dense, pool, kv_cache_dtype=name, k_scale=0.5, v_scale=torch.tensor(1.5))
    stored = Dense(dense.query, keys, values)
    assert_close(call(version, given), oracle(*stored)[0], extra=rounding(stored))
    if version == "v2":
        exp_sum, max_logits, tmp_out = scratch_for(dense.query, 3)
        out = torch.empty_like(dense.query)
        paged_attention_v2(out, exp_sum, max_logits, tmp_out, *given.values())
        for b, p, _, m, attention in states_of(stored, 512, 32**-0.5):
            assert_close(max_logits[b, :, p], m, extra=2 * rounding(stored))
            assert_close(tmp_out[b, :, p], attention, extra=2 * rounding(stored))


def test_v2_scales_values_by_kv_head():
    dense = random([600, 3], 6, 2, 32)
    pool = fp8_pool(dense.keys, dense.values, torch.float8_e4m3fn)
    v_scale = torch.tensor([0.5, 3.0])
    keys = [k.to(torch.float8_e4m3fn).float() for k in dense.keys]
    values = [v.to(torch.float8_e4m3fn).float() * v_scale[:, None] for v in dense.values]
    given = arguments(dense, pool, kv_cache_dtype="fp8", k_scale=1.0, v_scale=v_scale)
    exp_sum, max_logits, tmp_out = scratch_for(dense.query, 2)
    paged_attention_v2(
        torch.empty_like(dense.query), exp_sum, max_logits, tmp_out, *given.values()
    )
    stored = Dense(dense.query, keys, values)
    for b, p, _, _, attention in states_of(stored, 512, 32**-0.5):
        assert_close(tmp_out[b, :, p], attention, extra=2 * rounding(stored))


def test_the_documented_example_is_plain_attention():
    text = (Path(__file__).parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(example, names)
    out, lse = oracle(names["query"], [names["key"]], [names["value"]])
    assert_close(names["out"], out)
    assert_close(names["lse"][:, :, 0], lse)


# -- faults from the field


@each_version
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", ["32", "512"])
def test_pub_01_ones_own_tensors_give_the_worked_numbers(version, dtype, size, monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", size)
    dense = to(generated([40], 32, 8, 128), dtype)
    pool = paged(dense, 32, "vllm", tables=[[3, 1]], num_blocks=5)
    out, scratch = torch.full_like(dense.query, NAN), scratch_for(dense.query, 2)
    given = list(arguments(dense, pool, scale=0.25).values())
    if version == "v1":
        paged_attention_v1(out, *given)
    else:
        paged_attention_v2(out, *scratch, *given)
        live = -(-40 // int(size))
        m, s = scratch[1][0, :, :live], scratch[0][0, :, :live]
        lse = torch.logsumexp(m + s.log(), -1)
        assert_close(lse[[0, 5, 18]], torch.tensor([4.0675488, 4.2411163, 4.0006946]))
    right = [[-0.0853390, -0.1627555, 0.0938737], [0.0549693, -0.0751864, -0.0544913]]
    right += [[-0.2423493, 0.0962008, -0.0204549]]
    assert_close(out[0, [0, 5, 18]][:, [0, 1, 127]], torch.tensor(right))


@each_version
def test_pub_12_a_sink_merged_with_the_operations_result_is_counted_once(version, monkeypatch):
    """The operation knows no sinks: one is a state of its own, (0, sink), merged last."""
    for size in (4, 8, 12):
        monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", str(size))
        ones = Dense(torch.zeros(1, 1, 16), [torch.zeros(12, 1, 16)], [torch.ones(12, 1, 16)])
        given = arguments(ones, paged(ones, 4, "vllm"), scale=1.0)
        out, lse = torch.empty(1, 1, 16), torch.full((1, 1), math.log(12))
        if version == "v1":
            paged_attention_v1(out, *given.values())
        else:
            exp_sum, max_logits, tmp_out = scratch_for(ones.query, -(-12 // size))
            paged_attention_v2(out, exp_sum, max_logits, tmp_out, *given.values())
            lse = torch.logsumexp(max_logits + exp_sum.log(), -1)  # (num_seqs, num_heads)
            assert_close(lse, math.log(12))
        sink = torch.full((1, 1), math.log(4))
        merge_attn_states(out, out.clone(), lse.t(), torch.zeros_like(out), sink, lse)
        assert_close(out, 0.75)
        assert_close(lse, 2.7725887)


@each_version
def test_pub_19_fp8_scales_count_in_every_form_of_a_call(version):
    keys, values = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    keys[0], values[0] = 1.0, 4.0
    pool = fp8_pool([keys], [values], torch.float8_e4m3fn)
    dense = Dense(torch.ones(1, 1, 16), [keys], [values])
    for k_scale, v_scale in (
        (0.25, 0.5),
        (torch.tensor(0.25), torch.tensor(0.5)),
        (torch.tensor([0.25]), torch.tensor([0.5])),
    ):
        given = arguments(
            dense, pool, 1 / 16, kv_cache_dtype="fp8", k_scale=k_scale, v_scale=v_scale
        )
        out, scratch = torch.empty(1, 1, 16), scratch_for(dense.query, 1)
        names = ("exp_sum", "max_logits", "tmp_out")
        if version == "v1":
            paged_attention_v1(out=out, **given)
        else:
            paged_attention_v2(out=out, **dict(zip(names, scratch)), **given)
            assert_close(scratch[1] + scratch[0].log(), 0.8259394)
        assert_close(out, 1.1243530)
        assert_same(call(version, given), out)


def test_pub_22_partial_outputs_are_not_rounded_before_the_merge(monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", "16")
    values = torch.ones(48, 1, 16, dtype=torch.float16)
    values[0:9] = values[16:25] = 1.0009765625
    dense = Dense(torch.zeros(1, 1, 16, dtype=torch.float16), [torch.zeros_like(values)], [values])
    given = arguments(dense, paged(dense, 16, "vllm"))
    for dtype in (torch.float16, torch.float32):
        out = torch.full_like(dense.query, NAN)
        paged_attention_v2(out, *scratch_for(dense.query, 3, dtype), *given.values())
        assert out.eq(1.0).all()


# -- the partition size


def test_partitions_have_the_size_that_the_environment_gives(monkeypatch):
    dense = random([100, 37], 6, 2, 32)
    given = arguments(dense, paged(dense, 16, "vllm"))
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", "40")  # three blocks of 16
    exp_sum, max_logits, tmp_out = scratch_for(dense.query, 3)
    out = torch.full_like(dense.query, NAN)
    paged_attention_v2(out, exp_sum, max_logits, tmp_out, *given.values())
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))
    for b, p, s, _, _ in states_of(dense, 48, 32**-0.5):
        assert_close(exp_sum[b, :, p], s, extra=2 * rounding(dense))


def test_a_scratch_too_small_for_the_partition_size_is_refused(monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", "256")
    dense = random(LENS, 6, 2, 32)
    given = arguments(dense, paged(dense, 16, "vllm"))
    for short in range(3):
        scratch = list(scratch_for(dense.query, 5))
        scratch[short] = scratch[short][:, :, :4]
        name = ("exp_sum", "max_logits", "tmp_out")[short]
        with pytest.raises(
            ValueError, match=f"{name} must be .* with room for the 5 partitions of 256"
        ):
            paged_attention_v2(torch.empty_like(dense.query), *scratch, *given.values())


@pytest.mark.parametrize("name", ["PAGED_ATTENTION_PARTITION_SIZE", "PAGED_ATTENTION_V2_MIN_LEN"])
@pytest.mark.parametrize("text", ["-1", "512.0", "half", "1e3"])
def test_a_setting_that_is_no_count_is_an_error_by_name(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    dense = random([3], 2, 1, 16)
    with pytest.raises(ValueError, match=f"{name}.*{text}"):
        if "PARTITION" in name:
            call("v2", arguments(dense, paged(dense, 16, "vllm")))
        else:
            takes_v2(1)


# -- V1 or V2


def test_v2_begins_above_its_least_length(monkeypatch):
    assert [takes_v2(n) for n in (0, 8192, 8193)] == [False, False, True]
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "0")
    assert [takes_v2(n) for n in (0, 1, 8193)] == [False, True, True]


def test_upstreams_rule_asks_for_partitions_and_for_work_enough():
    for max_seq_len, num_seqs, num_heads, v2 in (
        (512, 1, 1, False),  # one partition
        (513, 1, 1, True),
        (8192, 16, 32, True),  # 512 is not enough to fill the device
        (8192, 19, 27, False),  # 513 is
        (8193, 19, 27, True),  # V1's logits don't fit
    ):
        assert upstream_takes_v2(max_seq_len, num_seqs, num_heads) is v2


# -- what isn't served


@each_version
@pytest.mark.parametrize(
    "name, value",
    [
        ("blocksparse_vert_stride", 8),
        ("blocksparse_local_blocks", 16),
        ("blocksparse_head_sliding_step", -1),
    ],
)
def test_block_sparse_attention_is_refused_by_name(version, name, value):
    dense = random([5], 2, 1, 16)
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        call(version, arguments(dense, paged(dense, 16, "vllm"), **{name: value}))


@each_version
def test_block_sparse_arguments_that_are_off_are_accepted(version):
    dense = random(LENS, 6, 2, 32)
    given = arguments(dense, paged(dense, 16, "vllm"))
    plain = call(version, given)
    for off in (
        {"blocksparse_vert_stride": None, "blocksparse_local_blocks": None, "tp_rank": 3},
        {"blocksparse_vert_stride": 1, "blocksparse_local_blocks": 16},  # every block is seen
    ):
        assert_same(call(version, given | off), plain)


@each_version
@pytest.mark.parametrize(
    "changed, words",
    [
        ({"num_kv_heads": 3}, "num_kv_heads must be the caches' 2, got 3"),
        ({"num_kv_heads": torch.tensor([0, 1])}, "num_kv_heads"),
        ({"block_size": 32}, "block_size must be the caches' 16, got 32"),
        ({"max_seq_len": 1029}, "max_seq_len must be at least .* 1029"),
        ({"max_seq_len": None}, "max_seq_len must be a whole number"),
        ({"scale": "1"}, "scale must be a number"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of .*'int8'"),
        ({"kv_cache_dtype": "fp8"}, "key_cache must be torch.uint8 .*'fp8'"),
        ({"alibi_slopes": torch.ones(5)}, "alibi_slopes must be .*6"),
    ],
)
def test_a_wrong_argument_is_an_error_by_name(version, changed, words):
    dense = random(LENS, 6, 2, 32)
    given = arguments(dense, paged(dense, 16, "vllm"), max_seq_len=1030)
    if changed.get("max_seq_len", 0) is None:
        with pytest.raises(TypeError, match=words):
            paged_attention_v1(torch.empty_like(dense.query), *(given | changed).values())
        return
    with pytest.raises((TypeError, ValueError), match=words):
        call(version, given | changed)


@each_version
def test_a_live_block_id_outside_the_pool_is_an_error(version):
    dense = random([40], 2, 1, 16)
    pool = paged(dense, 16, "vllm")
    pool.block_tables[0, 1] = len(pool.key_cache)
    with pytest.raises(ValueError, match=r"block_tables\[0\]\[1\]"):
        call(version, arguments(dense, pool))


@each_version
def test_a_query_of_rank_four_is_refused(version):
    dense = random([40], 2, 1, 16)
    given = arguments(dense, paged(dense, 16, "vllm"))
    given["query"] = dense.query[:, None]
    with pytest.raises(ValueError, match="query|exp_sum"):
        call(version, given)


@pytest.mark.parametrize(
    "place, tensor, words",
    [
        (0, torch.zeros(1, 2, 1, dtype=torch.float64), "exp_sum must be float32"),
        (1, torch.zeros(1, 3, 1), r"max_logits must be \(1, 2, 1\)"),
        (1, None, "max_logits must be a tensor"),
        (2, torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16), "tmp_out must be .*float16"),
        (2, torch.zeros(1, 2, 1, 32, dtype=torch.float16), r"tmp_out must be \(1, 2, 1, 16\)"),
        (0, torch.zeros(1, 2, 1, device="meta"), "exp_sum must be on cpu"),
    ],
)
def test_scratch_of_another_kind_is_refused(place, tensor, words):
    dense = random([40], 2, 1, 16, dtype=torch.float16)
    scratch = list(scratch_for(dense.query, 1))
    scratch[place] = tensor
    given = arguments(dense, paged(dense, 16, "vllm"))
    with pytest.raises((TypeError, ValueError), match=words):
        paged_attention_v2(torch.empty_like(dense.query), *scratch, *given.values())


# -- reshape_and_cache


def caches(num_blocks, block_size, heads, head_size, dtype, fill=NAN):
    key, value = empty_caches(num_blocks, block_size, heads, head_size, "vllm", dtype)
    return key.fill_(fill), value.fill_(fill)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_land_in_their_slots_and_nothing_else_changes(dtype):
    dense = random([37], 1, 3, 24, dtype=dtype)
    ours, wanted = caches(7, 16, 3, 24, dtype), caches(7, 16, 3, 24, dtype)
    table, order = [5, 0, 2], torch.randperm(37)
    slots = torch.tensor(table)[order // 16] * 16 + order % 16
    packed = torch.stack([dense.keys[0][order], dense.values[0][order]], dim=1)
    reshape_and_cache(*packed.unbind(1), *ours, slots, "auto", torch.tensor(9.0), 9.0)
    store(*wanted, "vllm", 16, table, dense.keys[0], dense.values[0])
    for got, want in zip(ours, wanted):
        assert_same(got, want)


@pytest.mark.parametrize("mapping", [[-1, 20, -1, 3], [-1, -1, -1, -1], [0, 1, 2, -7], []])
def test_negative_slots_are_skipped(mapping):
    dense = random([4], 1, 2, 8)
    for fill in (NAN, 3.0):
        ours, wanted = (caches(2, 16, 2, 8, torch.float32, fill) for _ in range(2))
        for token, slot in enumerate(mapping):
            if slot >= 0:
                block, offset = divmod(slot, 16)
                wanted[0][block, :, :, offset] = dense.keys[0][token].view(2, 2, 4)
                wanted[1][block, :, :, offset] = dense.values[0][token]
        slots = torch.tensor(mapping, dtype=torch.int32)
        reshape_and_cache(dense.keys[0], dense.values[0], *ours, slots, "auto", 1.0, 1.0)
        for got, want in zip(ours, wanted):
            assert_same(got, want)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_fp8_is_divided_by_the_scale_rounded_and_saturated(name):
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    largest = torch.finfo(dtype).max
    key = torch.tensor([[1.0, 300.0, -1e30, 2.0], [0.0, INF, -0.0, 1e-30]]).repeat(1, 4)[:, None]
    value = key.flip(0)
    ours = caches(1, 2, 1, 16, torch.uint8, 0)
    reshape_and_cache(key, value, *ours, torch.tensor([0, 1]), name, 0.5, torch.tensor(0.25))
    got_key = ours[0][0, 0].permute(1, 0, 2).reshape(2, 16).view(dtype).float()
    got_value = ours[1][0, 0].t().contiguous().view(dtype).float()
    for got, given, scale in ((got_key, key, 0.5), (got_value, value, 0.25)):
        want = (given[:, 0] / scale).clamp(-largest, largest)
        assert torch.equal(got, want.to(dtype).float())
        assert got.abs().max() == largest


def test_fp8_may_have_a_scale_for_each_kv_head():
    dense = random([5], 1, 2, 16)
    ours = caches(1, 16, 2, 16, torch.uint8, 0)
    scales = torch.tensor([0.5, 4.0])
    args = dense.keys[0], dense.values[0], *ours, torch.arange(5), "fp8", scales, scales
    reshape_and_cache(*args)
    got = ours[1][0].permute(2, 0, 1)[:5].contiguous().view(torch.float8_e4m3fn).float()
    want = (dense.values[0] / scales[:, None]).to(torch.float8_e4m3fn).float()
    assert torch.equal(got, want)


def test_tokens_beyond_the_slot_mapping_are_padding():
    dense = random([5], 1, 2, 8)
    ours = caches(1, 16, 2, 8, torch.float32)
    reshape_and_cache(dense.keys[0], dense.values[0], *ours, torch.arange(3), "auto", 1.0, 1.0)
    assert torch.equal(ours[1][0].permute(2, 0, 1)[:3], dense.values[0][:3])
    assert ours[1][0, :, :, 3:].isnan().all()


def test_what_is_written_is_what_the_kernel_reads():
    dense = to(random([70, 5], 4, 2, 32, sharp=3.0), torch.float16)
    pool = paged(Dense(dense.query, dense.keys, dense.values), 16, "vllm")
    pool.key_cache.fill_(NAN), pool.value_cache.fill_(NAN)
    for row, key, value in zip(pool.block_tables, dense.keys, dense.values):
        t = torch.arange(len(key))
        slots = row[t // 16].long() * 16 + t % 16
        reshape_and_cache(key, value, pool.key_cache, pool.value_cache, slots, "auto", 1.0, 1.0)
    out = call("v2", arguments(dense, pool))
    assert_close(out, oracle(*dense)[0], extra=rounding(dense))


def test_writing_reads_nothing_back_from_a_device():
    key = torch.empty(4, 2, 8, device="meta")
    cache = torch.empty(3, 2, 2, 16, 4, device="meta"), torch.empty(3, 2, 8, 16, device="meta")
    slots = torch.empty(4, dtype=torch.int64, device="meta")
    reshape_and_cache(key, key, *cache, slots, "auto", 1.0, 1.0)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"slot_mapping": torch.tensor([0, 32])}, "slot_mapping must be below 32, .*got 32"),
        ({"slot_mapping": torch.zeros(2)}, "slot_mapping must be int32 or int64"),
        ({"slot_mapping": torch.arange(6)}, "slot_mapping must be .*5 tokens"),
        ({"slot_mapping": torch.zeros(1, 2, dtype=torch.int64)}, "slot_mapping must be"),
        ({"key": torch.zeros(5, 3, 16)}, "key must be"),
        ({"value": torch.zeros(4, 2, 16)}, "value must be"),
        ({"value": torch.zeros(5, 2, 16, dtype=torch.int32)}, "value must be floating"),
        ({"key": [1.0]}, "key must be a tensor"),
        ({"kv_cache_dtype": "fp8"}, "key_cache must be torch.uint8"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of"),
        ({"v_scale": 0}, r"v_scale.*before 0\.5\.3"),
        ({"v_scale": None}, r"v_scale.*before 0\.5\.3"),
    ],
)
def test_a_wrong_write_is_an_error_by_name_and_writes_nothing(changed, words):
    cache = caches(2, 16, 2, 16, torch.float32)
    given = {
        "key": torch.zeros(5, 2, 16),
        "value": torch.zeros(5, 2, 16),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "slot_mapping": torch.arange(5),
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    assert list(inspect.signature(reshape_and_cache).parameters) == list(given)
    with pytest.raises((TypeError, ValueError), match=words):
        reshape_and_cache(*(given | changed).values())
    assert cache[0].isnan().all() and cache[1].isnan().all()


@pytest.mark.parametrize("scale, words", [(torch.ones(3), "one per KV head"), ("1", "a number")])
def test_a_wrong_fp8_scale_is_an_error_by_name(scale, words):
    cache = caches(2, 16, 2, 16, torch.uint8, 0)
    args = torch.ones(5, 2, 16), torch.ones(5, 2, 16), *cache, torch.arange(5), "fp8"
    with pytest.raises((TypeError, ValueError), match=f"v_scale must .*{words}"):
        reshape_and_cache(*args, 1.0, scale)
    assert cache[0].eq(0).all()


# -- merge_attn_states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_prefix_and_the_rest_merge_into_the_whole(dtype):
    whole = random([50, 9, 30], 4, 2, 32, sharp=3.0)
    split = [20, 0, 30]  # the second has no prefix, the third nothing else
    parts = []
    for first in (True, False):
        cut = [slice(None, n) if first else slice(n, None) for n in split]
        keys = [k[c] for k, c in zip(whole.keys, cut)]
        out, lse = oracle(whole.query, keys, [v[c] for v, c in zip(whole.values, cut)])
        parts.append((out.to(dtype), lse.float().t().contiguous()))
    (prefix, prefix_lse), (suffix, suffix_lse) = parts
    prefix[1], prefix_lse[:, 1] = NAN, INF  # nothing there: as FlashAttention says it
    suffix[2], suffix_lse[:, 2] = NAN, -INF
    want, want_lse = oracle(*whole)
    out, lse = torch.full_like(prefix, NAN), torch.full_like(prefix_lse, NAN)
    merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse)
    assert_close(out, want, extra=rounding(whole) + 1e-6 + (dtype != torch.float32) * 0.01)
    assert_close(lse, want_lse.t(), extra=rounding(whole))
    assert prefix_lse[0, 1] == INF  # inputs stay as they are

    alone = torch.full_like(out, NAN)
    merge_attn_states(alone, prefix, prefix_lse, suffix, suffix_lse)
    assert_same(alone, out)


@pytest.mark.parametrize("nothing", [INF, -INF])
def test_two_states_of_nothing_are_nothing(nothing):
    out, lse = torch.full((3, 2, 8), NAN), torch.full((2, 3), NAN)
    state = torch.full((3, 2, 8), NAN), torch.full((2, 3), nothing)
    merge_attn_states(out, *state, *state, output_lse=lse)
    assert out.eq(0).all() and lse.eq(-INF).all()


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            {"prefix_lse": torch.zeros(3, 2)},
            r"prefix_lse must be \(2, 3\) like the heads and tokens of output",
        ),
        ({"suffix_output": torch.zeros(3, 2, 4)}, "suffix_output must be"),
        ({"output": torch.zeros(6, 8)}, "must be"),
        ({"output_lse": 3}, "output_lse must be a tensor"),
        ({"suffix_lse": None}, "suffix_lse must be a tensor"),
    ],
)
def test_a_wrong_state_is_an_error_by_name(changed, words):
    given = {
        "output": torch.zeros(3, 2, 8),
        "prefix_output": torch.zeros(3, 2, 8),
        "prefix_lse": torch.zeros(2, 3),
        "suffix_output": torch.zeros(3, 2, 8),
        "suffix_lse": torch.zeros(2, 3),
        "output_lse": None,
    }
    assert list(inspect.signature(merge_attn_states).parameters) == list(given)
    with pytest.raises((TypeError, ValueError), match=words):
        merge_attn_states(*(given | changed).values())
