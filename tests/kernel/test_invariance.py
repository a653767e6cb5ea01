"""A sequence's bits are its own, with every option on, through calls and through both plans.

Alone, among 64, with its blocks elsewhere, beside 8,000 tokens, twenty times over, on two threads:
bit for bit on a CPU, within 2e-6 on CUDA. Capacity plans are held to others of their capacity.
"""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import (
    NAN,
    Dense,
    Pool,
    assert_close,
    assert_same,
    in_each_layout,
    on_each_device,
    paged,
    random,
    to,
)

from paged_attention import paged_attention, plan_decode

MINE, BLOCK, PARTITION = 300, 8, 64
SHAPES = {"6 heads of 16 on 2": (6, 2, 16), "7 heads of 48 on 7": (7, 7, 48)}
OPTIONS = {
    "plain": {},
    "a window": {"window": 100},
    "a cap and sinks": {"softcap": 5.0, "sinks": True, "scale": 1.0},
    "ALiBi, three rows": {"alibi_slopes": True, "q_len": 3},
    "three rows, not causal": {"q_len": 3, "causal": False},
    "everything": {
        "window": 77, "softcap": 9.0, "sinks": True, "alibi_slopes": True, "q_len": 3,
        "k_scale": True, "v_scale": 0.5, "kv_cache_dtype": "fp8",
    },
}  # fmt: skip
KINDS = ("paged_attention", "exact", "capacity")
in_each_kind = pytest.mark.parametrize("kind", KINDS)
with_each_option = pytest.mark.parametrize("option", OPTIONS)
in_each_shape = pytest.mark.parametrize("shape", SHAPES)


class Step:
    """Decode steps of one shape, layout and set of options."""

    def __init__(self, kind, layout, shape, option, device="cpu"):
        self.kind, self.layout, self.device = kind, layout, device
        self.sizes = self.num_heads, self.num_kv_heads, self.head_size = SHAPES[shape]
        options = dict(OPTIONS[option])
        self.q_len, self.window = options.pop("q_len", 1), options.pop("window", None)
        self.fp8 = options.get("kv_cache_dtype") == "fp8"
        for name, n, first in (
            ("sinks", self.num_heads, -1.0),
            ("alibi_slopes", self.num_heads, 0.01),
            ("k_scale", self.num_kv_heads, 1.5),
        ):
            if name in options:
                options[name] = torch.linspace(first, 0.5, n, device=device)
        self.options = options

    def sequence(self, tokens, seed):
        """The same every time: (query rows, key, value)."""
        dense = random(
            [tokens], self.num_heads * self.q_len, *self.sizes[1:], seed=seed, sharp=3.0
        )
        rows = dense.query.view(self.q_len, self.num_heads, self.head_size)
        key, value = dense.keys[0], dense.values[0]
        if self.fp8:
            key, value = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (key, value))
        return rows, key, value

    def batch(self, lens, at, seed):
        """(query, pool): mine at `at`, others around it."""
        sequences = [self.sequence(n, 1 if i == at else 100 + i) for i, n in enumerate(lens)]
        query, keys, values = zip(*sequences)
        dense = to(Dense(torch.stack(query), [*keys], [*values]), device=self.device)
        poison = (0x7F, 0x7F) if self.fp8 else (NAN, NAN)
        pool = paged(dense, BLOCK, self.layout, seed=seed, poison=poison, device=self.device)
        return (dense.query if self.q_len > 1 else dense.query[:, 0]), pool

    def call(self, lens, at=0, seed=0, capacity=None):
        """A function that decodes, and gives my part of (out, lse)."""
        query, pool = self.batch(lens, at, seed)
        how = {**self.options, "return_lse": True}
        if self.kind == "paged_attention":
            how.update(layout=self.layout, window=self.window, partition_size=PARTITION)
            run = paged_attention
        else:
            lengths = {"seq_lens": list(lens)}
            if self.kind == "capacity":
                lengths = {"num_seqs": len(lens), "max_seq_len": capacity}
            run = plan_decode(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                block_size=BLOCK,
                layout=self.layout,
                dtype=pool.key_cache.dtype,
                device=self.device,
                q_len=self.q_len,
                window=self.window,
                partition_size=PARTITION,
                **lengths,
            ).run
        return lambda: [x[at] for x in run(query, *pool, **how)]


def agree(got, right, device="cpu"):
    for name, x, y in zip(("out", "lse"), got, right):
        if device == "cpu":
            assert_same(x, y, name)
        else:
            assert_close(x, y.double(), what=name)


@on_each_device
@in_each_layout
@in_each_kind
@in_each_shape
@with_each_option
def test_bits_are_the_same_alone_among_64_and_wherever_the_blocks_lie(
    device, layout, kind, shape, option
):
    step = Step(kind, layout, shape, option, device)
    alone = step.call((MINE,), capacity=320)()
    assert alone[0].isfinite().all() and alone[0].abs().max() > 0.1
    others = tuple(1 + 37 * n % 101 for n in range(63))
    for lens, at, seed in (
        ((MINE,), 0, 1),
        ((MINE, *others), 0, 2),
        ((*others, MINE), 63, 3),
        ((0, 320, MINE, 1, 64, 0), 2, 4),
    ):
        agree(step.call(lens, at, seed, capacity=320)(), alone, device)


@on_each_device
@in_each_layout
@in_each_kind
@pytest.mark.parametrize("option", ["plain", "everything"])
def test_bits_are_the_same_beside_8000_tokens(device, layout, kind, option):
    step = Step(kind, layout, "6 heads of 16 on 2", option, device)
    alone = step.call((MINE,), capacity=8000)()
    agree(step.call((MINE, 8000), 0, 1, capacity=8000)(), alone, device)
    agree(step.call((8000, 0, MINE), 2, 2, capacity=8000)(), alone, device)


@in_each_layout
@in_each_kind
@with_each_option
def test_twenty_repeats_give_the_same_bits(layout, kind, option):
    call = Step(kind, layout, "6 heads of 16 on 2", option).call((MINE, 17, 64), capacity=320)
    right = call()
    for _ in range(20):
        agree(call(), right)


@in_each_layout
@in_each_kind
def test_two_threads_with_different_options_give_the_bits_of_serial_ones(layout, kind):
    """Nobody's workspace given: each thread has its own."""
    steps = [Step(kind, layout, "6 heads of 16 on 2", option) for option in OPTIONS]
    calls = [step.call((MINE, 40, 0), seed=i, capacity=320) for i, step in enumerate(steps)]
    serial, wrong, start = [call() for call in calls], [], threading.Barrier(2)

    def work(first):
        start.wait()
        for i in range(60):
            which = (first + i) % len(calls)
            got = calls[which]()
            if not all(torch.equal(x, y) for x, y in zip(got, serial[which])):
                wrong.append(list(OPTIONS)[which])

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@in_each_layout
@in_each_kind
@pytest.mark.parametrize("option", ["a window", "ALiBi, three rows", "everything"])
def test_a_live_nan_is_not_hidden_and_a_dead_one_not_seen(layout, kind, option):
    """In the sequence's own newest key: all its newest row. In a neighbour's: nothing of mine."""
    step = Step(kind, layout, "6 heads of 16 on 2", option)
    lens = (MINE, 41)
    right = step.call(lens, capacity=320)()
    query, pool = step.batch(lens, 0, 0)
    broken = Pool(pool.key_cache.clone(), pool.value_cache.clone(), *pool[2:])
    nan = 0x7F if step.fp8 else NAN
    for seq, tokens in enumerate(lens):
        block, offset = int(pool.block_tables[seq, (tokens - 1) // BLOCK]), (tokens - 1) % BLOCK
        where = (block, slice(None), offset) if layout == "HND" else (block, offset)
        if layout == "vllm":
            where = (block, ..., offset, slice(None))
        cache = broken.key_cache.clone()
        cache[where] = nan
        step.batch = lambda *_, cache=cache: (query, broken._replace(key_cache=cache))
        got = step.call(lens, capacity=320)()
        if seq == 0:
            newest = [x[-1] if step.q_len > 1 else x for x in got]
            assert all(x.isnan().all() for x in newest), "a live NaN was hidden"
        else:
            agree(got, right)
