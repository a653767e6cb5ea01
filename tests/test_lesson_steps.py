"""The checkers of steps: any right answer passes, and each wrong one has its sentence."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from paged_attention.lesson import CHECKERS, write_step

pytestmark = pytest.mark.quick
INF = float("inf")


def said(name, function, capsys):
    write_step(name, function)
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: ") and text.endswith("\n") and text.count("\n") == 1
    return text[len(name) + 2 : -1]


# -- merge_sums


def merged(m_a, s_a, acc_a, m_b, s_b, acc_b):
    m = torch.maximum(m_a, m_b).clamp_min(-1e30)
    a, b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, a * s_a + b * s_b, a[:, None] * acc_a + b[:, None] * acc_b


def merged_by_lse(m_a, s_a, acc_a, m_b, s_b, acc_b):
    """Another right answer: relative to the sum itself, so that s is 1."""
    lse = torch.logaddexp(m_a + s_a.log(), m_b + s_b.log()).clamp_min(-1e30)
    a, b = torch.exp(m_a - lse), torch.exp(m_b - lse)
    s = a * s_a + b * s_b
    return [lse, s, acc_a * a.unsqueeze(1) + acc_b * b.unsqueeze(1)]


def merged_in_float64(*states):
    return merged(*(x.double() for x in states))


def as_they_are(m_a, s_a, acc_a, m_b, s_b, acc_b):
    return torch.maximum(m_a, m_b), s_a + s_b, acc_a + acc_b


def first_is_larger(m_a, s_a, acc_a, m_b, s_b, acc_b):
    b = torch.exp(m_b - m_a)
    return m_a, s_a + b * s_b, acc_a + b[:, None] * acc_b


def with_e_to_the_m(m_a, s_a, acc_a, m_b, s_b, acc_b):
    a, b = m_a.exp(), m_b.exp()
    return torch.zeros(3), a * s_a + b * s_b, a[:, None] * acc_a + b[:, None] * acc_b


def divided(*states):
    m, s, acc = merged(*states)
    return m, s, acc / s[:, None]


def only_s(m_a, s_a, acc_a, m_b, s_b, acc_b):
    m, s, _ = merged(m_a, s_a, acc_a, m_b, s_b, acc_b)
    return m, s, acc_a + acc_b


def both_empty(m_a, s_a, acc_a, m_b, s_b, acc_b):
    m = torch.maximum(m_a, m_b)
    a, b = torch.exp(m_a - m), torch.exp(m_b - m)
    return m, a * s_a + b * s_b, a[:, None] * acc_a + b[:, None] * acc_b


def in_place(m_a, s_a, acc_a, m_b, s_b, acc_b):
    acc_a *= 2
    return m_a, s_a, acc_a


# -- gather_values


def gathered(cache, table, tokens):
    blocks = cache[table[: -(-tokens // cache.shape[-1])].long()]
    return blocks.permute(1, 0, 3, 2).reshape(cache.shape[1], -1, cache.shape[2])[:, :tokens]


def gathered_by_select(cache, table, tokens):
    blocks = cache.index_select(0, table[: -(-tokens // cache.shape[-1])])
    return blocks.permute(1, 0, 3, 2).flatten(1, 2).narrow(1, 0, tokens)


def in_a_loop(cache, table, tokens):
    blocks = [cache[int(i)] for i in table if i >= 0]
    return torch.cat(blocks, -1).transpose(1, 2)[:, :tokens]


def copied_in_a_loop(cache, table, tokens):
    out = torch.empty(2, 3 * len(table), 5)
    for i, block in enumerate(table[: -(-tokens // 3)].tolist()):
        out[:, 3 * i : 3 * i + 3] = cache[block].transpose(1, 2)
    return out[:, :tokens]


def uncut(cache, table, tokens):
    blocks = cache[table[: -(-tokens // 3)].long()]
    return blocks.permute(1, 0, 3, 2).reshape(2, -1, 5)


def whole_table(cache, table, tokens):
    return cache[table.long()].permute(1, 0, 3, 2).reshape(2, -1, 5)


def pools_order(cache, table, tokens):
    return cache[: -(-tokens // 3)].permute(1, 0, 3, 2).reshape(2, -1, 5)[:, :tokens]


def not_permuted(cache, table, tokens):
    return cache[table[: -(-tokens // 3)].long()].reshape(2, -1, 5)[:, :tokens]


def full_blocks(cache, table, tokens):
    return cache[table[: tokens // 3].long()].permute(1, 0, 3, 2).reshape(2, -1, 5)[:, :tokens]


# -- pad_partitions


def padded(x, v, size):
    extra = -x.shape[1] % size
    x, v = F.pad(x, (0, extra), value=-INF), F.pad(v, (0, 0, 0, extra))
    return x.view(len(x), -1, size), v.view(len(v), -1, size, v.shape[-1])


def padded_by_copy(x, v, size):
    parts = -(-x.shape[1] // size)
    logits = x.new_full((len(x), parts * size), -INF)
    logits[:, : x.shape[1]] = x
    values = v.new_full((len(v), parts * size, v.shape[-1]), 3.0)  # finite, and that is enough
    values[:, : x.shape[1]] = v
    return [logits.unflatten(1, (-1, size)), values.unflatten(1, (-1, size))]


def pad_with(fill, value_fill=0.0, front=False, extra_partition=False):
    def step(x, v, size):
        extra = size - x.shape[1] % size if extra_partition else -x.shape[1] % size
        ends = (extra, 0) if front else (0, extra)
        x = F.pad(x, ends, value=fill)
        v = F.pad(v, (0, 0, *ends), value=value_fill)
        return x.view(2, -1, size), v.view(2, -1, size, 5)

    return step


def cut_off(x, v, size):
    tokens = x.shape[1] // size * size
    return x[:, :tokens].view(2, -1, size), v[:, :tokens].view(2, -1, size, 5)


# -- group_logits


def grouped(q, k):
    q = q.view(len(k), -1, q.shape[-1])
    return torch.bmm(q, k.transpose(1, 2)).flatten(0, 1)


def grouped_by_einsum(q, k):
    return torch.einsum("kgd,ktd->kgt", q.view(len(k), -1, q.shape[-1]), k).flatten(0, 1)


def left_grouped(q, k):
    return q.view(len(k), -1, q.shape[-1]) @ k.transpose(1, 2)


def heads_alternate(q, k):
    q = q.view(-1, len(k), q.shape[-1]).transpose(0, 1)
    return (q @ k.transpose(1, 2)).transpose(0, 1).reshape(-1, k.shape[1])


def repeats(q, k):
    k = k.repeat_interleave(len(q) // len(k), 0)
    return (k @ q.unsqueeze(-1)).squeeze(-1)


def repeated_wrongly(q, k):
    return (k.repeat(len(q) // len(k), 1, 1) @ q.unsqueeze(-1)).squeeze(-1)


def many_gemms(q, k):
    return torch.cat([a @ b.t() for a, b in zip(q.view(len(k), -1, q.shape[-1]), k)])


# -- one_tile


def tile(q, k, v, size, in_partitions):
    if k.shape[1] > size:
        return in_partitions(q, k, v)
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)


def tile_by_hand(q, k, v, size, in_partitions):
    if -(-k.shape[1] // size) > 1:
        return in_partitions(q, k, v)
    x = q @ k.mT
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights @ v / weights.sum(-1, keepdim=True)


def too_strict(q, k, v, size, in_partitions):
    return in_partitions(q, k, v) if k.shape[1] >= size else tile(q, k, v, size, in_partitions)


def never(q, k, v, size, in_partitions):
    return tile(q, k, v, 10**9, in_partitions)


def over_heads(q, k, v, size, in_partitions):
    if k.shape[1] > size:
        return in_partitions(q, k, v)
    return torch.softmax(q @ k.mT, 1) @ v


def undivided(q, k, v, size, in_partitions):
    return in_partitions(q, k, v) if k.shape[1] > size else torch.exp(q @ k.mT) @ v


# -- merge_as_product


def product(m, sums):
    both = torch.bmm(torch.exp(m - m.amax(1, keepdim=True))[:, None], sums)[:, 0]
    return both[:, :-1] / both[:, -1:]


def product_by_softmax(m, sums):
    both = torch.einsum("hp,hpd->hd", torch.softmax(m, -1), sums)
    return both[:, :-1] / both[:, -1:]


def two_products(m, sums):
    scale = torch.exp(m - m.amax(1, keepdim=True))[:, None]
    return (torch.bmm(scale, sums[..., :-1]) / torch.bmm(scale, sums[..., -1:]))[:, 0]


def no_maxima(m, sums):
    both = sums.sum(1)
    return both[:, :-1] / both[:, -1:]


def not_divided(m, sums):
    return torch.bmm(torch.exp(m - m.amax(1, keepdim=True))[:, None], sums)[:, 0, :-1]


def s_twice(m, sums):  # what the change notes' own Phase 2 does
    scale = torch.exp(m - m.amax(1, keepdim=True)) * sums[..., -1]
    return torch.bmm(scale[:, None], sums[..., :-1])[:, 0] / scale.sum(1, keepdim=True)


def with_the_column(m, sums):
    both = torch.bmm(torch.exp(m - m.amax(1, keepdim=True))[:, None], sums)[:, 0]
    return both / both[:, -1:]


# -- wave_update


def wave(m, s, acc, x, v):
    new = torch.maximum(m, x.amax(1)).clamp_min(-1e30)
    old, w = torch.exp(m - new), torch.exp(x - new[:, None])
    return new, s * old + w.sum(1), acc * old[:, None] + (w[:, None] @ v)[:, 0]


def not_rescaled(m, s, acc, x, v):
    new = torch.maximum(m, x.amax(1))
    w = torch.exp(x - new[:, None])
    return new, s + w.sum(1), acc + (w[:, None] @ v)[:, 0]


def acc_left(m, s, acc, x, v):
    new, total, _ = wave(m, s, acc, x, v)
    return new, total, acc + (torch.exp(x - new[:, None])[:, None] @ v)[:, 0]


def overwritten(m, s, acc, x, v):
    return wave(torch.full_like(m, -INF), s * 0, acc * 0, x, v)


def nan_at_first(m, s, acc, x, v):
    m_wave = x.amax(1)
    w = torch.exp(x - m_wave[:, None])
    return merged(m, s, acc, m_wave, w.sum(1), (w[:, None] @ v)[:, 0])


def normalised(m, s, acc, x, v):
    new, total, acc = wave(m, s, acc, x, v)
    return new, total, acc / total[:, None]


RIGHT = {
    "merge_sums": (merged, merged_by_lse, merged_in_float64),
    "gather_values": (gathered, gathered_by_select),
    "pad_partitions": (padded, padded_by_copy),
    "group_logits": (grouped, grouped_by_einsum),
    "one_tile": (tile,),
    "merge_as_product": (product, product_by_softmax),
    "wave_update": (wave,),
}
BUT = [  # right, and something is told
    ("gather_values", in_a_loop, "are read back to the host"),
    ("gather_values", copied_in_a_loop, "each block more costs"),
    ("group_logits", repeats, "K was copied to 6 heads on the way (peak 1,"),
    ("group_logits", many_gemms, "with 2 GEMMs"),
    ("one_tile", tile_by_hand, "two products and one softmax are enough"),
    ("merge_as_product", two_products, "five are enough"),
]
WRONG = [
    ("merge_sums", as_they_are, "the sums are added as they are"),
    ("merge_sums", first_is_larger, "for logits above 200|for an empty first partition"),
    ("merge_sums", with_e_to_the_m, "doesn't fit a float32"),
    ("merge_sums", divided, "acc is divided already"),
    ("merge_sums", only_s, "acc isn't"),
    ("merge_sums", both_empty, "two empty partitions should leave s = 0"),
    ("merge_sums", in_place, "it changed one of its arguments"),
    ("merge_sums", lambda *x: merged(*x)[1:], "three tensors: m, s and acc"),
    ("gather_values", uncut, "the slots of the last block past seq_len came along"),
    ("gather_values", whole_table, "entries past the sequence's end were followed"),
    ("gather_values", pools_order, "NaN .* was read|other tokens than the table's"),
    ("gather_values", not_permuted, "permute the dimensions first"),
    ("gather_values", full_blocks, "the last, partly filled block was forgotten"),
    ("gather_values", lambda c, t, n: gathered(c, t, n).transpose(0, 1), "KV heads should come"),
    ("pad_partitions", pad_with(0.0), "padded with 0, which is a key of weight"),
    ("pad_partitions", pad_with(-INF, -INF), "a weight of 0 times it is NaN"),
    ("pad_partitions", pad_with(-INF, front=True), "the padding stands before"),
    ("pad_partitions", pad_with(-INF, extra_partition=True), "nothing but padding was added"),
    ("pad_partitions", cut_off, "the last partition was forgotten"),
    ("pad_partitions", lambda x, v, size: padded(x, v, size)[0], "should return two tensors"),
    ("group_logits", left_grouped, r"shape \(2, 3, 7\) .* one view is missing"),
    ("group_logits", heads_alternate, "heads 0, 1, 2, 3, 4, 5 got KV heads 0, 1, 0, 1, 0, 1"),
    ("group_logits", repeated_wrongly, "got KV heads 0, 1, 0, 1, 0, 1, not 0, 0, 0, 1, 1, 1"),
    ("group_logits", lambda q, k: grouped(q, k) / 2, "head 0 has no KV head's logits"),
    ("one_tile", too_strict, "they fit one partition, and took two phases"),
    ("one_tile", never, "they need more than one, and took the short way"),
    ("one_tile", over_heads, "should go over tokens"),
    ("one_tile", undivided, "nothing is divided"),
    ("merge_as_product", no_maxima, "maxima are forgotten"),
    ("merge_as_product", not_divided, "nothing was divided"),
    ("merge_as_product", s_twice, "multiplied in once more"),
    ("merge_as_product", with_the_column, "drop it"),
    ("wave_update", not_rescaled, "added as they are|and acc isn't|wrong"),
    ("wave_update", acc_left, "acc isn't brought along"),
    ("wave_update", overwritten, "the others are forgotten"),
    ("wave_update", nan_at_first, "slots without a token|-inf - -inf is NaN"),
    ("wave_update", normalised, "divided already"),
]


def test_every_step_has_right_and_wrong_answers_here():
    assert RIGHT.keys() == CHECKERS.keys() == {name for name, *_ in WRONG}


@pytest.mark.parametrize("name", CHECKERS)
def test_a_step_that_is_not_written_is_not_tried_yet(name, capsys):
    assert said(name, lambda *_: None, capsys) == "not tried yet"


@pytest.mark.parametrize("name, function", [(n, f) for n, fs in RIGHT.items() for f in fs])
def test_any_right_answer_is_right(name, function, capsys):
    verdict = said(name, function, capsys)
    assert verdict.startswith("right") and "and " not in verdict.replace("and no copy", "")


@pytest.mark.parametrize("name, function, words", BUT)
def test_a_right_answer_that_misses_the_point_is_told_so(name, function, words, capsys):
    verdict = said(name, function, capsys)
    assert verdict.startswith("right, ") and words in verdict


@pytest.mark.parametrize("name, function, words", WRONG)
def test_a_wrong_answer_is_told_what_it_missed(name, function, words, capsys):
    verdict = said(name, function, capsys)
    assert not verdict.startswith("right") and re.search(words, verdict), verdict


@pytest.mark.parametrize("name", CHECKERS)
def test_an_exception_in_the_readers_function_becomes_a_sentence(name, capsys):
    def step(*args):
        return args[0] + "three"

    verdict = said(name, step, capsys)
    assert verdict.startswith("it raised TypeError for ")
    assert 'args[0] + "three"' in verdict


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.parametrize("answer", [3, "text", torch.zeros(()), (torch.zeros(1),) * 3])
def test_what_is_no_answer_gets_a_sentence_too(name, answer, capsys):
    assert not said(name, lambda *_: answer, capsys).startswith(("right", "not tried"))
