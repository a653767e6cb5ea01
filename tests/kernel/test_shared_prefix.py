"""Sequences that share a prefix read it once, and each gets what it would get alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers import DTYPES, assert_close, assert_same, oracle, pairwise, rounding
from pools import FP8_NAN, GARBAGE, LAYOUTS, NAN, Dense, Pool, paged, random

from paged_attention import (
    Workspace,
    merge_states,
    paged_attention,
    plan_decode,
    shared_prefix_attention,
)
from paged_attention.measure import count
from paged_attention.measure.counting import OpCounter

BLOCK, PARTITION = 8, 24
HEADS = ((6, 2, 16), (7, 7, 48), (1, 1, 8), (7, 1, 104), (12, 1, 32))  # KV heads and head size
OPTIONS = {
    "plain": {},
    "window": {"window": 50},
    "window of a few": {"window": 9, "q_len": 2},
    "cap and sinks": {"softcap": 5.0, "sinks": True, "scale": 1.0},
    "ALiBi, 3 rows": {"alibi_slopes": True, "q_len": 3},
    "5 rows, not causal": {"q_len": 5, "causal": False},
    "everything": {
        "window": 77, "softcap": 9.0, "sinks": True, "alibi_slopes": True, "q_len": 3,
        "k_scale": True, "v_scale": 0.5, "kv_cache_dtype": "fp8",
    },
}  # fmt: skip


class Member(NamedTuple):
    group: int  # or -1
    suffix: int  # tokens


PREFIXES = [64, 40, 8, 48]  # the third has nobody, the fourth has one
MEMBERS = [
    Member(*both)
    for both in ((0, 5), (1, 24), (0, 30), (-1, 41), (0, 0), (3, 1), (1, 3), (-1, 0), (0, 16))
]


class Step(NamedTuple):
    """One step, ready for both calls."""

    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    prefix: tuple[torch.Tensor, torch.Tensor]  # tables, lens
    suffix: tuple[torch.Tensor, torch.Tensor]
    group_of: torch.Tensor
    plain: tuple[torch.Tensor, torch.Tensor]  # tables, lens
    dense: Dense  # by value
    options: dict

    def shared(self, **more):
        inputs = self.query, *self.caches, *self.prefix, *self.suffix, self.group_of
        more = {"partition_size": PARTITION, "return_lse": True, **more}
        return shared_prefix_attention(*inputs, **{**self.options, **more})

    def apart(self, **more):
        inputs = self.query, *self.caches, *self.plain
        more = {"partition_size": PARTITION, "return_lse": True, **more}
        return paged_attention(*inputs, **{**self.options, **more})


def step_of(
    members=MEMBERS,
    prefixes=PREFIXES,
    option="plain",
    layout="HND",
    heads=HEADS[0],
    dtype=torch.float32,
    seed=0,
    num_blocks=700,
):
    """A prefix of so many tokens, and a member with so many more, is the same in every step.

    What no row sees is NaN, and ids that nobody may follow stand there.
    """
    num_heads, num_kv_heads, head_size = heads
    options = {"layout": layout, **OPTIONS[option]}
    q_len, fp8 = options.pop("q_len", 1), "kv_cache_dtype" in options
    head_size = -(-head_size // 16) * 16 if fp8 else head_size
    for name, n, first in (
        ("sinks", num_heads, -1.0),
        ("alibi_slopes", num_heads, 0.01),
        ("k_scale", num_kv_heads, 1.5),
    ):
        if name in options:
            options[name] = torch.linspace(first, 0.5, n)
    sizes = num_heads * q_len, num_kv_heads, head_size

    def tokens(n, of):
        return random([n], *sizes, seed=1000 * of + n, sharp=3.0)

    beginnings = [tokens(n, 1) for n in prefixes]
    ends = [tokens(m.suffix, m.group + 3) for m in members]
    stored = torch.float8_e4m3fn if fp8 else dtype
    held = []
    for which in (1, 2):  # keys, values
        some = [
            torch.cat([*([beginnings[m.group][which][0]] if m.group >= 0 else []), end[which][0]])
            for m, end in zip(members, ends)
        ]
        held.append([x.to(stored) for x in some])
    query = torch.cat([end.query for end in ends]).to(dtype)
    query = query.view(len(members), q_len, num_heads, head_size)
    query = query if q_len > 1 else query[:, 0]
    dense = Dense(query, *([x.float() if fp8 else x.clone() for x in some] for some in held))

    lens = [len(key) for key in held[0]]
    firsts = [max(0, n - q_len - options.get("window", n) + 1) for n in lens]
    of_group = [[i for i, m in enumerate(members) if m.group == g] for g in range(len(prefixes))]
    for i, (first, m) in enumerate(zip(firsts, members)):
        # A token of a prefix is there for whoever sees it, and it is NaN if nobody does.
        least = min(firsts[j] for j in of_group[m.group]) if m.group >= 0 else first
        end = prefixes[m.group] if m.group >= 0 else 0
        for some in held:
            for unseen in (some[i][: min(least, end)], some[i][end : max(first, end)]):
                # PyTorch 2.1 fills no float8, so a NaN is written there as its byte.
                unseen.view(torch.uint8).fill_(FP8_NAN) if fp8 else unseen.fill_(NAN)
    tables, ids = (
        [],
        iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))),
    )
    rows = [[int(next(ids)) for _ in range(n // BLOCK)] for n in prefixes]
    for n, m in zip(lens, members):
        row = list(rows[m.group]) if m.group >= 0 else []
        tables.append(row + [int(next(ids)) for _ in range(-(-n // BLOCK) - len(row))])
    raw = [[x.view(torch.uint8) if fp8 else x for x in some] for some in held]
    poison = (0x7F, 0x7F) if fp8 else (NAN, NAN)
    pool: Pool = paged(
        Dense(query, *raw), BLOCK, layout, tables=tables, num_blocks=num_blocks, poison=poison
    )
    for i, first in enumerate(firsts):
        pool.block_tables[i, : first // BLOCK] = GARBAGE[i % len(GARBAGE)]
    before = [prefixes[m.group] if m.group >= 0 else 0 for m in members]
    own = [row[n // BLOCK :] for row, n in zip(tables, before)]
    for row, n, first in zip(own, before, firsts):
        row[: max(0, first - n) // BLOCK] = [-3] * (max(0, first - n) // BLOCK)
    for group, row in enumerate(rows):
        least = min([firsts[i] for i in of_group[group]], default=prefixes[group])
        row[: least // BLOCK] = [-7] * (min(least, prefixes[group]) // BLOCK)
    suffix_lens = torch.tensor([n - b for n, b in zip(lens, before)])
    return Step(
        query,
        pool[:2],
        (table_of(rows, 2), torch.tensor(prefixes, dtype=torch.int64)),
        (table_of(own, 1), suffix_lens),
        torch.tensor([m.group for m in members]),
        pool[2:],
        dense,
        options,
    )


def table_of(rows, extra):
    """Wider than the longest row, and padded with ids that nobody may follow."""
    columns = max(map(len, rows), default=0) + extra
    padded = [[*row, *(GARBAGE[c % 5] for c in range(columns - len(row)))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), columns)


def right_of(step):
    """(out, lse, allowance) in float64, of the dense tokens."""
    o = step.options
    scales = [torch.as_tensor(o.get(name, 1.0)).view(-1, 1) for name in ("k_scale", "v_scale")]
    keys, values = ([x.float() * s for x in xs] for xs, s in zip(step.dense[1:], scales))
    dense = Dense(step.query.float(), keys, values)
    how = {name: o.get(name) for name in ("window", "softcap", "sinks")}
    slopes = o.get("alibi_slopes")
    how |= {"scale": o.get("scale"), "slopes": slopes, "causal": o.get("causal", True)}
    return *oracle(*dense, **how), rounding(dense, o.get("scale"), slopes)


# -- the same answers


@pairwise(option=OPTIONS, layout=LAYOUTS, heads=HEADS, dtype=DTYPES)
def test_sharing_agrees_with_float64_and_with_the_call_on_whole_tables(row):
    step = step_of(**row)
    out, lse, extra = right_of(step)
    got = step.shared()
    assert_close(got[0], out, extra=extra)
    assert_close(got[1], lse, dtype=torch.float32, extra=extra, what="lse")
    plain = step.apart()
    assert_close(got[0], plain[0].double(), extra=extra)
    assert_close(got[1], plain[1].double(), dtype=torch.float32, extra=extra, what="lse")


@pairwise(option=OPTIONS, members=[(Member(0, 3),), (Member(-1, 3),), (Member(1, 0),) * 3])
def test_small_steps_agree_too(row):
    step = step_of(row["members"], [16, 8], row["option"])
    out, lse, extra = right_of(step)
    got = step.shared()
    assert_close(got[0], out, extra=extra)
    assert_close(got[1], lse, extra=extra, what="lse")


@pytest.mark.parametrize("heads", [(24, 2, 8), (7, 1, 8)])
def test_members_whose_logits_exceed_a_wave_become_several_items_and_agree(heads):
    members = [Member(0, n % 3) for n in range(90 if heads[0] == 24 else 300)]
    step = step_of(members, [1032], heads=heads)
    got, plain = step.shared(partition_size=None), step.apart(partition_size=None)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": 8, "block_size": BLOCK}
    plan = plan_decode(
        **sizes, layout="HND", seq_lens=step.plain[1],
        prefix_lens=step.prefix[1], group_of=step.group_of,
    )  # fmt: skip
    rows = [w.group for w in plan.schedule.waves if w.sharing is not None and w.width == 1024]
    assert len(rows) > 1 and sum(rows) == len(members) * heads[0] // heads[1]
    assert_close(got[0], plain[0].double())
    assert_close(got[1], plain[1].double(), what="lse")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_plan_for_shared_prefixes_runs_like_any_other(option):
    # The first member of a group sees less of it than the next ones, with a window.
    step = step_of(sorted(MEMBERS, key=lambda m: -m.suffix), option=option)
    tables, lens = step.plain
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": BLOCK}
    q_len = step.query.shape[1] if step.query.dim() == 4 else 1
    options = {n: x for n, x in step.options.items() if n not in ("window", "layout")}
    plan = plan_decode(
        **sizes, layout="HND", seq_lens=lens, q_len=q_len, window=step.options.get("window"),
        dtype=step.caches[0].dtype, partition_size=PARTITION,
        prefix_lens=step.prefix[1], group_of=step.group_of.tolist(),
    )  # fmt: skip
    right, workspace = step.shared(), Workspace()
    for _ in range(2):
        out = torch.full_like(step.query, NAN)
        inputs = step.query, *step.caches, tables, lens
        more = {"out": out, "workspace": workspace, "return_lse": True}
        got = plan.run(*inputs, **more, **options)
        for x, y, name in zip(got, right, ("out", "lse")):
            assert_same(x, y, name)
        assert workspace.nbytes == plan.workspace_bytes
        for tensor in workspace.tensors():
            tensor.fill_(NAN)

    def run():
        plan.run(*inputs, out=out, workspace=workspace, **options)

    run()
    counted = count(run)
    assert counted.host_reads == 0 and counted.peak_bytes == 0


def test_a_tree_of_two_levels_is_two_calls():
    """All four begin with 64 tokens, and each two of them share 40 more."""
    step = step_of([Member(0, 72 + n) for n in (0, 5, 9, 20)], [64])
    tables, lens = step.plain
    tables = tables.clone()
    columns = slice(64 // BLOCK, 104 // BLOCK)
    tables[1, columns], tables[3, columns] = tables[0, columns], tables[2, columns]
    right = paged_attention(step.query, *step.caches, tables, lens, layout="HND", return_lse=True)
    nothing, groups = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    how = {"layout": "HND", "return_lse": True, "causal": False}
    states = [
        shared_prefix_attention(
            step.query, *step.caches, tables[:1], torch.tensor([64]), tables[:, :0], nothing,
            torch.zeros(4, dtype=torch.int64), **how,
        ),
        shared_prefix_attention(
            step.query, *step.caches, tables[::2, columns], torch.tensor([40, 40]),
            tables[:, columns.stop :], lens - 104, groups, **how,
        ),
    ]  # fmt: skip
    out, lse = merge_states(*map(torch.stack, zip(*states)))
    assert_close(out, right[0].double())
    assert_close(lse, right[1].double(), what="lse")


# -- bits


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def alone(members, i, **how):
    return step_of([members[i]], **how).shared()


@pairwise(option=OPTIONS, heads=HEADS, layout=LAYOUTS, dtype=DTYPES)
def test_bits_do_not_depend_on_who_shares(row):
    together = step_of(**row).shared()
    for i in range(len(MEMBERS)):
        for x, y, name in zip(alone(MEMBERS, i, seed=i, **row), together, ("out", "lse")):
            assert_same(x, y[i : i + 1], name)
    order = [8, 3, 0, 6]
    some = step_of([MEMBERS[i] for i in order], seed=5, **row).shared()
    for x, y, name in zip(some, together, ("out", "lse")):
        assert_same(x, y[order], name)


@pytest.mark.parametrize("num_threads", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("heads", [(8, 1, 64), (8, 2, 100), (24, 4, 256), (3, 3, 40), (2, 1, 72)])
def test_bits_do_not_depend_on_how_many_share_with_many_threads_either(
    threads, num_threads, heads
):
    threads(num_threads)
    for option in ("plain", "ALiBi, 3 rows"):
        for partition_size in (None, 32):
            how = {"partition_size": partition_size}
            member, prefixes = Member(0, 20), [200]
            right = step_of([member], prefixes, option, heads=heads).shared(**how)
            for num_seqs in (2, 5, 24):
                others = [Member(0, n % 9) for n in range(num_seqs - 1)]
                step = step_of([*others, member], prefixes, option, heads=heads)
                for x, y, name in zip(step.shared(**how), right, ("out", "lse")):
                    assert_same(x[-1:], y, f"{name} of {num_seqs}")


@pairwise(option=["plain", "window", "ALiBi, 3 rows", "everything"], layout=LAYOUTS)
def test_a_token_that_is_nan_reaches_those_who_see_it_and_nobody_else(row):
    """With a window of 50, the first of the members sees the prefix from another token on."""
    members = [Member(0, 5), Member(0, 45), Member(0, 60), Member(-1, 9)]
    step = step_of(members, [64], **row)
    right = step.shared()
    for token in (63, 20, 14):
        broken = step_of(members, [64], **row)
        block, slot = int(broken.plain[0][0, token // BLOCK]), token % BLOCK
        if block < 0:  # before every window
            continue
        value = broken.caches[1]
        nan = 0x7F if value.dtype == torch.uint8 else NAN
        place = {"HND": (block, 0, slot), "NHD": (block, slot, 0), "vllm": (block, 0, ..., slot)}
        value[place[row["layout"]]] = nan
        got = broken.shared()
        q_len = step.query.shape[1] if step.query.dim() == 4 else 1
        window = step.options.get("window")
        for i, member in enumerate(members):
            end = 64 + member.suffix - q_len - (window or 200) + 1
            if member.group < 0 or token < end:
                assert_same(got[0][i], right[0][i], f"{token} in {member}")
            else:
                assert got[0][i].isnan().any(), f"{token} in {member}"


# -- cost


class Reads(OpCounter):
    """Counts what is gathered from the memory of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.places, self.num_bytes = {t.untyped_storage().data_ptr() for t in tensors}, 0

    def see_op(self, name, inputs, outputs):
        super().see_op(name, inputs, outputs)
        if any(t.untyped_storage().data_ptr() in self.places for t in inputs):
            assert name == "index_select"
            self.num_bytes += outputs[0].numel() * outputs[0].element_size()


def cache_bytes_read(call, caches):
    with Reads(caches) as reads:
        call()
    return reads.num_bytes


def test_a_prefix_is_gathered_once_for_all_who_share_it():
    """The bytes of K and V that a step gathers are those of the prefix and of all suffixes."""
    members = [Member(0, 8 * (1 + n % 3)) for n in range(20)]
    step = step_of(members, [480])
    for times, run in ((1, step.shared), (20, step.apart)):
        tokens = times * 480 + sum(m.suffix for m in members)
        kv = 2 * tokens * 2 * 16 * 4  # K and V, 2 heads of 16 lanes, float32
        assert cache_bytes_read(run, step.caches) == kv


def test_where_nothing_is_shared_a_plan_is_the_plain_one():
    step = step_of([Member(-1, n) for n in (40, 3, 77)], [])
    plain, shared = step.apart(), step.shared()
    for x, y, name in zip(shared, plain, ("out", "lse")):
        assert_same(x, y, name)
