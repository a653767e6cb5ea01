"""paged_decode.cu on a CPU: compiled by the host's C++ compiler, its threads taking turns.

How a device would run it, nobody can tell from here, but for what CUDA's own rules say.
"""

from __future__ import annotations

import functools

import pytest
import torch
from cuda_on_cpu import BACKWARD, FORWARD, CpuLibrary, a_step, compiled, needs_a_compiler, ways
from field_cases import dtypes, ends, logits, merging, reading  # noqa: F401  (they fill CASES)
from field_cases.judging import CASES, Row
from helpers import assert_close, assert_same, pairwise, rounding
from pools import INF, NAN, paged, random

from paged_attention import Workspace, reference_attention
from paged_attention.kernel.compiled.cuda_source import paged_decode
from paged_attention.vllm import paged_attention_v2

pytestmark = needs_a_compiler
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A library for each load_words, by its path."""
    return functools.cache(lambda words: compiled(tmp_path_factory.mktemp("cu"), words))


# -- the field cases


class CudaRow(Row):
    """A row whose answers are paged_decode.cu's, with every number in fp16 and in bf16.

    Where a number isn't exact in a dtype, or the kernel has no such option, there is no answer.
    """

    def __init__(self, libraries):
        super().__init__("vllm", "exact", "cpu")  # of a plan's run, because values go unchecked
        self.libraries = libraries

    def answers(self, query, pool, *, sizes=None, capacity=None, scale=1.0, **options):
        slopes = options.pop("alibi_slopes", None)
        block_size, lens = pool.value_cache.shape[3], pool.seq_lens.tolist()
        has_options = any(value is not None for value in options.values())
        if query.dim() == 4 or query.shape[2] % 8 or has_options:
            return
        how = {"scale": scale, "alibi_slopes": slopes, "max_seq_len": max([1, *lens])}
        for q, *caches in self.in_halves(query, *pool[:2]):
            for library in ways(self.libraries, block_size):
                for size in sizes or (block_size, 4 * block_size):
                    out = torch.full(q.shape, NAN, dtype=query.dtype)
                    call = q, *caches, *pool[2:]
                    yield paged_decode(
                        library, *call, partition_size=size, out=out, return_lse=True, **how
                    )

    def in_halves(self, query, key, value):
        if query.dtype == key.dtype and key.dtype in HALVES:
            yield query, key, value
            return
        for dtype in HALVES:
            if key.dtype == torch.float32:
                key = key.permute(0, 1, 3, 2, 4).flatten(3).unflatten(3, (-1, 8))
                key = key.permute(0, 1, 3, 2, 4).contiguous()
            tensors = query, key, value
            typed = [t.to(dtype) for t in tensors]
            if all(((a == b) | (b != b)).all() for a, b in zip(typed, tensors)):
                yield typed


SERVED = {  # case -> how many results it judges at least. PUB-04 has numbers that fp16 lacks
    "PUB-01": 12, "PUB-02": 20, "PUB-03": 20, "PUB-05": 50, "PUB-07": 6, "PUB-08": 100,
    "PUB-09": 8, "PUB-14": 8, "PUB-15": 3, "PUB-17": 80, "PUB-21": 19, "PUB-22": 3,
}  # fmt: skip


@pytest.mark.parametrize("number", SERVED)
def test_a_field_case_is_served(libraries, number):
    row = CudaRow(libraries)
    CASES[number](row)
    assert row.count >= SERVED[number], row.count


# -- random steps


@pairwise(
    dtype=HALVES,
    heads=[(1, 1), (6, 2), (6, 1), (8, 1), (9, 1), (18, 2), (5, 5)],
    head_size=[8, 64, 72, 256],
    block_size=[2, 8, 16, 48],
    partition_size=[16, 32, 100],
    has_slopes=[False, True],
    out_dtype=["query's", torch.float32],
)
def test_random_steps_agree_with_float64_and_no_order_of_threads_changes_a_bit(libraries, row):
    dtype, head_size, block_size = row["dtype"], row["head_size"], row["block_size"]
    lens = [0, 1, 2 * block_size, row["partition_size"] + 1]
    dense = random(lens, *row["heads"], head_size, sharp=3.0, dtype=dtype)
    pool = paged(dense, block_size, "vllm", extra_columns=3)
    slopes = torch.linspace(-0.5, 0.3, row["heads"][0]) if row["has_slopes"] else None
    scale, call = 1.5 * head_size**-0.5, (dense.query, *pool)
    right, right_lse = reference_attention(*call, scale=scale, alibi_slopes=slopes)
    extra = rounding(dense, scale, slopes)
    for library in ways(libraries, block_size):
        answers = []
        for order in (library.order, FORWARD if library.order else BACKWARD):
            library.order = order
            poison(workspace := Workspace())
            out = torch.full_like(dense.query, NAN)
            out = out.float() if row["out_dtype"] == torch.float32 else out
            how = {"max_seq_len": 120, "partition_size": row["partition_size"], "out": out}
            how |= {"scale": scale, "alibi_slopes": slopes, "return_lse": True}
            answers.append(paged_decode(library, *call, **how, workspace=workspace))
        for out, lse in answers:
            assert_close(out, right, extra=extra)
            assert_close(lse, right_lse, extra=extra, what="lse")
            assert_same(out, answers[0][0])
            assert_same(lse, answers[0][1], "lse")


def poison(workspace):
    """Make it hold NaN, whatever is asked of it next."""
    workspace._memory = torch.full((2**18,), NAN)


def test_a_partitions_states_are_what_vllms_operation_leaves_in_its_scratch(libraries):
    call, how = a_step()
    query, key, value, tables, lens = call
    ours = exp_sums, max_logits, tmp_out = [
        torch.full(shape, NAN) for shape in ((3, 6, 3), (3, 6, 3), (3, 6, 3, 64))
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PAGED_ATTENTION_PARTITION_SIZE", "16")
        paged_attention_v2(
            torch.empty_like(query), *ours, query, key, value, 2, 0.125, tables, lens, 16, 48
        )
    for library in ways(libraries, 16):
        poison(workspace := Workspace())
        paged_decode(library, *call, workspace=workspace, **how)
        states = workspace._last[1]
        assert_close(states.tmp_out()[:, :, :2], tmp_out[:, :, :2].nan_to_num(), extra=1e-5)
        for name, wanted in (("exp_sums", exp_sums), ("max_logits", max_logits)):
            got = getattr(states, name)()
            seen = ~wanted.isnan()
            assert torch.equal(got.isnan(), ~seen), "a partition past the end was written"
            assert_close(got[seen], wanted[seen], extra=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_out_is_the_float32_result_rounded_to_the_nearest(libraries, dtype):
    call, how = a_step(dtype)
    for library in ways(libraries, 16):
        out, _ = paged_decode(library, *call, **how)
        exact, _ = paged_decode(library, *call, **how, out=torch.empty(out.shape))
        assert_same(out, exact.to(dtype))


@pytest.mark.parametrize("fault", ["id of -1", "id too large", "length", "table", "negative"])
def test_what_would_read_another_memory_becomes_nan_and_stays_alone(libraries, fault):
    call, how = a_step(spare=0)  # so that no block holds NaN, which would look the same
    query, key, value, tables, lens = call
    right = paged_decode(next(ways(libraries, 16)), *call, **how)
    tables, lens = tables.clone(), lens.clone()
    tables[1, :4] = tables[0, [0, 1, 0, 1]]  # full blocks, for all tokens that are claimed
    if fault.startswith("id"):
        tables[1, 1] = -1 if fault == "id of -1" else len(key)
    elif fault == "length":
        lens[1] = 49
    elif fault == "table":
        tables, how["max_seq_len"], lens[1] = tables[:, :3].contiguous(), 64, 49
    else:
        lens[1] = -1
    for library in ways(libraries, 16):
        answer = paged_decode(library, query, key, value, tables, lens, **how)
        for got, wanted in zip(answer, right):
            assert got[1].isnan().all()
            assert_close(got[[0, 2]], wanted[[0, 2]].double(), extra=1e-5)


def test_queries_and_caches_may_be_parts_of_larger_tensors(libraries):
    call, how = a_step()
    query, key, value, tables, lens = call
    wide = torch.full((3, 10, 64), NAN, dtype=query.dtype)
    wide[:, :6] = query
    halves = torch.full((len(key), 2, key[0].numel()), NAN, dtype=key.dtype)
    halves[:, 0], halves[:, 1] = key.flatten(1), value.flatten(1)
    key2, value2 = halves[:, 0].view(key.shape), halves[:, 1].view(value.shape)
    rows = torch.full((5, 6, 64), NAN, dtype=query.dtype)
    for library in ways(libraries, 16):
        out, lse = paged_decode(library, *call, **how)
        other = paged_decode(
            library, wide[:, :6], key2, value2, tables, lens, **how, out=rows[1:4]
        )
        assert_same(other[0], out)
        assert_same(other[1], lse)
        assert rows[[0, 4]].isnan().all()
        heads = torch.stack([query[:, 0]], 1), torch.stack([query[:, 0]]).transpose(0, 1)
        one, same = (
            paged_decode(
                library, q, key[:, :1].contiguous(), value[:, :1].contiguous(), tables, lens, **how
            )
            for q in heads
        )
        assert heads[0].stride() != heads[1].stride()
        assert_same(one[0], same[0])


def test_a_batch_or_a_pool_of_nothing_is_served(libraries):
    library = CpuLibrary(libraries(1))
    (query, key, value, tables, lens), how = a_step()
    out, lse = paged_decode(library, query[:0], key, value, tables[:0], lens[:0], **how)
    assert out.shape == (0, 6, 64) and lse.shape == (0, 6)
    how["max_seq_len"] = 0
    out, lse = paged_decode(library, query, key[:0], value[:0], tables[:, :0], 0 * lens, **how)
    assert (out == 0).all() and (lse == -INF).all()


def test_a_group_that_shared_memory_cannot_hold_is_cut_further(libraries):
    dense = random([600], 8, 1, 576, dtype=torch.bfloat16)
    pool = paged(dense, 16, "vllm")
    library = CpuLibrary(libraries(1), 64)
    out = torch.empty(dense.query.shape)
    call = library, dense.query, *pool
    paged_decode(*call, max_seq_len=600, partition_size=1024, out=out)
    assert_close(out, reference_attention(dense.query, *pool)[0])
    with pytest.raises(ValueError, match="partition_size must be .* shared memory"):
        paged_decode(*call, max_seq_len=600, partition_size=16_000)
