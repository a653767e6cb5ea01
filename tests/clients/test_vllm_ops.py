"""vLLM's attention operations, called as vLLM calls them: right numbers in every form of a call,
and an error by name for what isn't served."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from helpers import DTYPES, assert_close, assert_same, oracle, rounding
from pools import NAN, empty_caches, generated, paged, random, to
from vllm_calls import (
    BAD_SCALES,
    OPERATIONS,
    arguments,
    each_version,
    run,
    run_v2,
    scratch_for,
    step,
)

from paged_attention import DecodePlan
from paged_attention.vllm.choice import takes_v2


def assert_right(out, dense, **options):
    assert_close(out, oracle(*dense, **options)[0], extra=rounding(dense))


# -- numbers


@each_version
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size, head_size", [(16, 48), (8, 264), (3, 16)])
def test_a_ragged_batch_matches_the_oracle(version, dtype, block_size, head_size):
    dense, given = step(head_size=head_size, block_size=block_size, sharp=3.0, dtype=dtype)
    assert_right(run(version, given | {"max_seq_len": 1111}, scratch_for(dense.query, 3)), dense)


@each_version
def test_alibi_slopes_bias_by_the_distance_from_the_newest_token(version):
    dense, given = step(sharp=3.0)
    slopes = torch.tensor([0.0, 0.5, 0.25, -0.125, 1.0, 0.03])
    assert_right(run(version, given | {"alibi_slopes": slopes}), dense, slopes=slopes)


@each_version
def test_a_batch_of_nothing_is_served(version):
    none = random([], 6, 2, 32)
    empty = empty_caches(4, 16, 2, 32, "vllm", torch.float32)
    pool = paged(none, 16, "vllm", num_blocks=4)._replace(key_cache=empty[0], value_cache=empty[1])
    assert run(version, arguments(none, pool)).shape == (0, 6, 32)
    assert run(version, step([0, 0])[1]).eq(0).all()


@each_version
def test_out_may_be_float32_and_a_strided_view(version):
    dense, given = step(dtype=torch.float16)
    wide = torch.full((4, 12, 32), NAN)
    assert_right(run(version, given, out=wide[:, ::2]), dense)
    assert wide[:, 1::2].isnan().all()


@each_version
def test_lengths_on_a_device_are_never_read_back(version, monkeypatch):
    """On meta any read of a value raises; and one plan serves all layers of many steps."""
    mapping = torch.empty(6, dtype=torch.int32, device="meta")
    made = []
    init = DecodePlan.__init__
    monkeypatch.setattr(
        DecodePlan, "__init__", lambda *a, **more: (made.append(a), init(*a, **more))[1]
    )
    pool = [torch.empty(n, device="meta") for n in ((9, 2, 12, 16, 4), (9, 2, 48, 16))]
    tables = torch.empty(3, 80, dtype=torch.int32, device="meta")
    lens = torch.empty(3, dtype=torch.int32, device="meta")
    query = torch.empty(3, 6, 48, device="meta")
    scratch = [t.to("meta") for t in scratch_for(query, 3)] if version == "v2" else []
    for max_seq_len in (1031, 1031, 1032):
        for kv_heads in (2, mapping):
            rest = (kv_heads, 0.1, tables, lens, 16, max_seq_len, None, "auto", 1.0, 1.0)
            OPERATIONS[version](torch.empty_like(query), *scratch, query, *pool, *rest)
    assert len(made) <= 1


# -- the forms of a call


@each_version
def test_the_parameters_have_vllms_names_and_order(version):
    before = ["out"] if version == "v1" else ["out", "exp_sum", "max_logits", "tmp_out"]
    names = list(inspect.signature(OPERATIONS[version]).parameters)
    assert names == before + list(step([3])[1])


@each_version
def test_eleven_positional_arguments_are_enough(version):
    """CoreX's vLLM 0.6.3 ends with alibi_slopes; kv_cache_dtype may follow as None."""
    _, given = step()
    whole = run(version, given)
    assert_same(run(version, given, count=10), whole)
    assert_same(run(version, given | {"kv_cache_dtype": None}, count=11), whole)


@each_version
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_head_mapping_means_the_caches_kv_heads(version, dtype):
    """CoreX's vLLM passes it for num_kv_heads, by position and by name."""
    _, given = step()
    mapping = torch.tensor([0, 0, 0, 1, 1, 1], dtype=dtype)
    whole = run(version, given)
    assert_same(run(version, given | {"num_kv_heads": mapping}, count=10), whole)
    by_name, out = given | {"num_kv_heads": mapping}, torch.empty_like(whole)
    scratch = scratch_for(given["query"], 3)._asdict() if version == "v2" else {}
    OPERATIONS[version](out=out, **scratch, **by_name)
    assert_same(out, whole)


@pytest.mark.parametrize("is_inference", [True, False])
def test_a_head_mapping_is_read_once_and_again_when_it_is_changed(monkeypatch, is_inference):
    _, given = step()
    with torch.inference_mode(is_inference):
        mapping, other = (torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32) for _ in range(2))
    read, tolist = [], torch.Tensor.tolist

    def noted(tensor):
        if tensor is mapping or tensor is other:
            read.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    for _ in range(3):
        for version in OPERATIONS:
            run(version, given | {"num_kv_heads": mapping})
    assert len(read) == 1
    run("v1", given | {"num_kv_heads": other})
    assert len(read) == 2
    with pytest.raises(ValueError, match="num_kv_heads"):  # right for 2 KV heads, not for 3
        run("v1", step(num_kv_heads=3)[1] | {"num_kv_heads": mapping})
    if not is_inference:
        mapping[5] = 0
        with pytest.raises(ValueError, match=r"num_kv_heads\[5\]"):
            run("v1", given | {"num_kv_heads": mapping})


@each_version
@pytest.mark.parametrize(
    "changed",
    [
        {"k_scale": 3.0, "v_scale": 5.0},  # of caches that describe themselves
        {"k_scale": torch.tensor(NAN), "v_scale": torch.tensor(NAN)},
        {"blocksparse_vert_stride": None, "blocksparse_local_blocks": None, "tp_rank": 3},
        {"blocksparse_vert_stride": 1, "blocksparse_local_blocks": 16},  # every block is seen
    ],
)
def test_arguments_that_mean_nothing_change_nothing(version, changed):
    _, given = step()
    assert_same(run(version, given | changed), run(version, given))


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
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", BAD_SCALES, ids=str)
def test_pub_31_an_fp8_scale_of_0_nan_or_infinity_is_refused_by_name(version, name, scale):
    _, given = step([40])
    caches = torch.zeros(5, 2, 2, 16, 16, dtype=torch.uint8)
    fp8 = {"key_cache": caches, "value_cache": torch.zeros(5, 2, 32, 16, dtype=torch.uint8)}
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "fp8"} | {name: scale}
    out, scratch = torch.full_like(given["query"], NAN), scratch_for(given["query"], 1)
    with pytest.raises(ValueError, match=f"{name} must be finite in float32, and not 0"):
        run(version, given | fp8 | scales, scratch, out)
    assert all(tensor.isnan().all() for tensor in (out, *scratch))


@each_version
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", ["32", "512"])
def test_pub_01_ones_own_tensors_give_the_worked_numbers(version, dtype, size, monkeypatch):
    monkeypatch.setenv("PAGED_ATTENTION_PARTITION_SIZE", size)
    dense = to(generated([40], 32, 8, 128), dtype)
    pool = paged(dense, 32, "vllm", tables=[[3, 1]], num_blocks=5)
    scratch = scratch_for(dense.query, 2)
    out = run(version, arguments(dense, pool, scale=0.25), scratch)
    if version == "v2":
        live = -(-40 // int(size))
        lse = (scratch.max_logits + scratch.exp_sum.log())[0, :, :live].logsumexp(-1)
        assert_close(lse[[0, 5, 18]], torch.tensor([4.0675488, 4.2411163, 4.0006946]))
    right = [[-0.0853390, -0.1627555, 0.0938737], [0.0549693, -0.0751864, -0.0544913]]
    right += [[-0.2423493, 0.0962008, -0.0204549]]
    assert_close(out[0, [0, 5, 18]][:, [0, 1, 127]], torch.tensor(right))


# -- V1 or V2


def test_v2_begins_above_its_least_length(monkeypatch):
    assert [takes_v2(n) for n in (0, 8192, 8193)] == [False, False, True]
    monkeypatch.setenv("PAGED_ATTENTION_V2_MIN_LEN", "0")
    assert [takes_v2(n) for n in (0, 1, 8193)] == [False, True, True]


@pytest.mark.parametrize("name", ["PAGED_ATTENTION_PARTITION_SIZE", "PAGED_ATTENTION_V2_MIN_LEN"])
@pytest.mark.parametrize("text", ["-1", "512.0", "half", "1e3"])
def test_a_setting_that_is_no_count_is_an_error_by_name(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}.*{text}"):
        run_v2(step([3])[1], 1) if "PARTITION" in name else takes_v2(1)


# -- what isn't served


@each_version
@pytest.mark.parametrize(
    "changed, words",
    [
        ({"num_kv_heads": 3}, "num_kv_heads must be the caches' 2, got 3"),
        ({"num_kv_heads": torch.tensor([0, 1])}, r"num_kv_heads must be \(6,\).*head_mapping"),
        ({"num_kv_heads": torch.tensor([0.0, 0, 0, 1, 1, 1])}, "num_kv_heads must be int32"),
        ({"num_kv_heads": torch.tensor([0, 1, 0, 1, 0, 1])}, r"num_kv_heads\[1\].* must be 0,"),
        ({"num_kv_heads": torch.tensor([0, 0, 0, 1, 1, 7])}, r"num_kv_heads\[5\].* got 7"),
        ({"num_kv_heads": torch.tensor([-1, 0, 0, 1, 1, 1])}, r"num_kv_heads\[0\].* got -1"),
        ({"num_kv_heads": torch.tensor([0] * 6)}, r"num_kv_heads\[3\].* must be 1,"),
        ({"num_kv_heads": [0, 0, 0, 1, 1, 1]}, "num_kv_heads must be a whole number"),
        ({"block_size": 32}, "block_size must be the caches' 16, got 32"),
        ({"max_seq_len": 1029}, "max_seq_len must be at least .* 1029"),
        ({"max_seq_len": None}, "max_seq_len must be a whole number"),
        ({"scale": "1"}, "scale must be a number"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of .*'int8'"),
        ({"kv_cache_dtype": "fp8"}, "key_cache must be torch.uint8 .*'fp8'"),
        ({"alibi_slopes": torch.ones(5)}, "alibi_slopes must be .*6"),
        ({"query": torch.zeros(4, 1, 6, 32)}, "query must be"),
        ({"k_scale": 1.0, "v_scale": 0}, r"v_scale.*before 0\.5\.3"),  # kv_scale, tp_rank
        ({"k_scale": 1.0, "v_scale": None}, r"v_scale.*before 0\.5\.3"),  # kv_scale alone
        ({"blocksparse_vert_stride": 8}, "blocksparse_vert_stride.*8"),
        ({"blocksparse_local_blocks": 16}, "blocksparse_local_blocks.*16"),
        ({"blocksparse_head_sliding_step": -1}, "blocksparse_head_sliding_step.*-1"),
    ],
)
def test_a_wrong_argument_is_an_error_by_name_and_nothing_is_written(version, changed, words):
    _, given = step()
    out, scratch = torch.full_like(given["query"], NAN), scratch_for(given["query"], 3)
    with pytest.raises((TypeError, ValueError), match=words):
        run(version, given | changed, scratch, out)
    for tensor in (out, *scratch):
        assert tensor.isnan().all()


@each_version
def test_a_live_block_id_outside_the_pool_is_an_error(version):
    _, given = step([40])
    given["block_tables"][0, 1] = len(given["key_cache"])
    with pytest.raises(ValueError, match=r"block_tables\[0\]\[1\]"):
        run(version, given)


def test_a_captured_graph_is_refused(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    on_meta = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in step([40])[1].values())
    with pytest.raises(RuntimeError, match="enforce_eager"):
        OPERATIONS["v1"](torch.empty(1, 6, 32, device="meta"), *on_meta)
