"""A sequence's bits are its own, whatever is decoded beside it and wherever its blocks lie.

Bit for bit on a CPU and within 2e-6 on CUDA: alone, among 64, in another order, in another pool,
again and again, and on two threads. Capacity plans are held to others of their capacity.
"""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from helpers import DTYPES, assert_close, assert_same, on_each_device, pairwise
from hypothesis import given
from hypothesis import strategies as st
from pools import INF, LAYOUTS, NAN, Dense, paged, random, to
from ways import WAYS, way

HEADS = ((6, 2, 16), (7, 7, 48), (1, 1, 8), (7, 1, 104), (3, 3, 40))  # with KV heads and head size
SIZES = ((8, 64), (16, None), (1, 8), (4, 24))  # blocks and partitions
OPTIONS = {
    "plain": {},
    "window": {"window": 100},
    "cap and sinks": {"softcap": 5.0, "sinks": True, "scale": 1.0},
    "ALiBi, 3 rows": {"alibi_slopes": True, "q_len": 3},
    "3 rows, not causal": {"q_len": 3, "causal": False},
    "everything": {
        "window": 77, "softcap": 9.0, "sinks": True, "alibi_slopes": True, "q_len": 3,
        "k_scale": True, "v_scale": 0.5, "kv_cache_dtype": "fp8",
    },
}  # fmt: skip


class Step:
    """Decode steps of one kind. A sequence of so many tokens is the same sequence every time."""

    def __init__(
        self,
        kind="paged_attention",
        layout="HND",
        option="plain",
        heads=HEADS[0],
        sizes=SIZES[0],
        dtype=torch.float32,
        device="cpu",
    ):
        self.kind, self.layout, self.device, self.dtype = kind, layout, device, dtype
        self.block_size, self.partition_size = sizes
        options = dict(OPTIONS[option])
        self.q_len, self.window = options.pop("q_len", 1), options.pop("window", None)
        self.fp8 = "kv_cache_dtype" in options
        self.num_heads, self.num_kv_heads, head_size = heads
        self.head_size = -(-head_size // 16) * 16 if self.fp8 else head_size
        for name, n, first in (
            ("sinks", self.num_heads, -1.0),
            ("alibi_slopes", self.num_heads, 0.01),
            ("k_scale", self.num_kv_heads, 1.5),
        ):
            if name in options:
                options[name] = torch.linspace(first, 0.5, n, device=device)
        self.options = options

    def batch(self, lens, bad=None):
        """bad: NaN or infinity, for the newest key and value of the first sequence."""
        rows, keys, values = self.num_heads * self.q_len, [], []
        sequences = [
            random([n], rows, self.num_kv_heads, self.head_size, seed=n, sharp=3.0) for n in lens
        ]
        query = torch.cat([s.query for s in sequences]).to(self.dtype)
        query = query.view(len(lens), self.q_len, self.num_heads, self.head_size)
        for number, sequence in enumerate(sequences):
            for held, tensors in ((sequence.keys[0], keys), (sequence.values[0], values)):
                if number == 0 and bad is not None:
                    held[-1] = bad
                held = held.to(torch.float8_e4m3fn if self.fp8 else self.dtype)
                tensors.append(held.view(torch.uint8) if self.fp8 else held)
        return Dense(query if self.q_len > 1 else query[:, 0], keys, values)

    def call(self, lens, bad=None, **where):
        """A function that decodes these lengths and returns (out, lse)."""
        dense = to(self.batch(lens, bad), device=self.device)
        where = {"poison": (0x7F, 0x7F) if self.fp8 else (NAN, NAN), **where}
        pool = paged(dense, self.block_size, self.layout, device=self.device, **where)
        sizes = self.partition_size, 800 if self.kind == "capacity" else None
        run = way(self.kind, dense.query, pool, self.layout, *sizes, self.window)
        return lambda: run(dense.query, *pool, return_lse=True, **self.options)

    def decode(self, lens, **where):
        return self.call(lens, **where)()

    def agree(self, got, right):
        for name, x, y in zip(("out", "lse"), got, right):
            if self.device == "cpu":
                assert_same(x, y, name)
            else:
                assert_close(x, y.double(), what=name)


WIDTHS = [0, 1, 8, 9, 75, 76, 200, 256, 257, 513, 777, 8]
ORDER = [7, 3, 11, 10, 0, 1, 5]
OTHERS = [1 + 37 * n % 101 for n in range(63)]


# Heads, KV heads, head size, block size and tokens that MKL cuts differently in a batch.
MANY_THREADS = {
    8: [(8, 1, 64, 8, 100), (8, 2, 100, 16, 1000), (9, 3, 40, 3, 61)],
    16: [(24, 4, 256, 4, 1124), (6, 2, 72, 5, 37)],
    32: [(32, 8, 128, 1, 100), (8, 1, 64, 8, 100)],
}
MANY_THREADS |= {1: MANY_THREADS[8], 2: MANY_THREADS[8]}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", sorted(MANY_THREADS))
@pytest.mark.parametrize("kind", ["paged_attention", "capacity"])
def test_own_03_bits_do_not_depend_on_the_batch_with_many_threads_either(
    threads, num_threads, kind
):
    """Neither widths nor head sizes are multiples of 16, to which products are padded."""
    threads(num_threads)
    for num_heads, num_kv_heads, head_size, block_size, tokens in MANY_THREADS[num_threads]:
        heads, sizes = (num_heads, num_kv_heads, head_size), (block_size, None)
        for option in ("plain", "ALiBi, 3 rows"):
            step = Step(kind, "HND", option, heads, sizes)
            alone = step.decode([tokens])
            for num_seqs in (2, 3, 8, 24):
                step.agree([t[-1:] for t in step.decode([tokens] * num_seqs)], alone)


@on_each_device
@pairwise(kind=WAYS, layout=LAYOUTS, option=OPTIONS, heads=HEADS, sizes=SIZES, dtype=DTYPES)
def test_bits_do_not_depend_on_the_batch(device, row):
    """Widths of every kind beside each other, each of them alone, permuted, and one among 64."""
    step = Step(**row, device=device)
    together = step.decode(WIDTHS)
    assert together[0].isfinite().all() and together[0].abs().max() > 0.1
    for i, tokens in enumerate(WIDTHS):
        alone = step.decode([tokens], seed=i)
        step.agree(alone, [x[i : i + 1] for x in together])
    step.agree(step.decode(WIDTHS), together)
    step.agree(step.decode([WIDTHS[i] for i in ORDER]), [x[ORDER] for x in together])
    for lens, at in (([200, *OTHERS], 0), ([*OTHERS, 200], 63)):
        step.agree([x[at] for x in step.decode(lens)], [x[6] for x in together])


@given(
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    kind=st.sampled_from(WAYS),
    layout=st.sampled_from(LAYOUTS),
    sizes=st.sampled_from(SIZES),
)
def test_bits_do_not_depend_on_any_batch(lens, kind, layout, sizes):
    step = Step(kind, layout, sizes=sizes)
    together = step.decode(lens)
    for i, tokens in enumerate(lens):
        step.agree(step.decode([tokens], seed=i), [x[i : i + 1] for x in together])


@on_each_device
@pairwise(kind=WAYS, layout=LAYOUTS)
def test_bits_do_not_depend_on_where_the_blocks_lie(device, row):
    """In order, backwards, far apart in a big pool, with wider tables and other integers."""
    step = Step(**row, device=device)
    right = step.decode([75], tables=[list(range(10))], extra_columns=0)
    for where in (
        {"tables": [list(range(10))[::-1]]},
        {"tables": [list(range(0, 900, 90))], "num_blocks": 1000},
        {"seed": 5, "spare": 0},
        {"seed": 6, "spare": 300},
        {"extra_columns": 50},
        {"index_dtype": torch.int64},
    ):
        step.agree(step.decode([75], **where), right)


@pairwise(kind=WAYS, layout=LAYOUTS, option=OPTIONS)
def test_twenty_repeats_give_the_same_bits(row):
    step = Step(**row)
    call = step.call([300, 17, 64])
    right = call()
    for _ in range(20):
        step.agree(call(), right)


@pytest.fixture
def hasty_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind, layout", [*zip(WAYS, LAYOUTS)])
def test_two_threads_give_the_bits_of_one(kind, layout, hasty_threads):
    """Other options and other tokens in turn, and no workspace given: each thread has its own."""
    calls = [Step(kind, layout, option).call([300, 40, 0]) for option in OPTIONS]
    calls += [Step(kind, layout).call([tokens, 40, 0]) for tokens in (296, 297, 298, 299)]
    serial, wrong, start = [call() for call in calls], [], threading.Barrier(2)

    def work(first):
        start.wait()
        for i in range(100):
            which = (first + i) % len(calls)
            got = calls[which]()
            if not all(torch.equal(x, y) for x, y in zip(got, serial[which])):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pairwise(
    kind=WAYS, layout=LAYOUTS, option=["window", "ALiBi, 3 rows", "everything"], bad=[NAN, INF]
)
def test_a_live_nan_is_not_hidden_and_a_neighbours_not_seen(row):
    step = Step(**{name: row[name] for name in ("kind", "layout", "option")})
    right = step.decode([41, 300])
    bad = NAN if step.fp8 else row["bad"]  # e4m3 has no infinity
    out, lse = step.decode([41, 300], bad=bad)
    newest = (0, -1) if step.q_len > 1 else 0
    assert not out[newest].isfinite().any(), "a live NaN was hidden"
    step.agree([out[1:], lse[1:]], [x[1:] for x in right])
