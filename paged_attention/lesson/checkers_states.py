"""Checkers of the steps that make and merge states: notebooks 01, 06 and 08.

A state stands for the sum of e^logit * value, and it may stand relative to any maximum. So a state
is judged by its two meanings: acc / s, and m + log s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_attention.lesson.steps import Function, Misunderstood, called, close, tensor_of
from paged_attention.measure import count

INF = float("inf")
HEADS, LANES = 3, 5
State = tuple[Tensor, Tensor, Tensor]


def merge_sums(function: Function) -> str:
    """Merge the states of two partitions.

    function(m_a, s_a, acc_a, m_b, s_b, acc_b) -> (m, s, acc), with m and s (num_heads,) and acc
    (num_heads, head_size), the undivided sum. An empty partition's state is -inf, 0, 0.
    """
    one, two, low = _state(4, 0.0), _state(7, 3.0), _state(2, -3.0)
    empty = torch.full((HEADS,), -INF), torch.zeros(HEADS), torch.zeros(HEADS, LANES)
    big, bigger = _state(4, 200.0), _state(2, 203.0)
    cases = {
        "a first maximum that is the larger": (one, low),
        "a second maximum that is the larger": (one, two),
        "logits above 200": (big, bigger),
        "an empty second partition": (one, empty),
        "an empty first partition": (empty, two),
    }
    for case, (a, b) in cases.items():
        _judge(called(function, *a, *b, case=case), [a, b], case)
    result = called(function, *empty, *empty, case="two empty partitions")
    _, s, acc = _parts_of(result, "two empty partitions")
    if s.any() or acc.any():  # NaN is true, too
        raise Misunderstood(
            "two empty partitions should leave s = 0 and acc = 0, and -inf - -inf is NaN"
        )
    return "right"


def wave_update(function: Function) -> str:
    """Take one more wave into a running state.

    function(m, s, acc, logits, v) -> (m, s, acc), with m and s (num_heads,), acc (num_heads,
    head_size), logits (num_heads, tokens) and v (num_heads, tokens, head_size). Before the first
    wave the state is -inf, 0, 0. A logit of -inf is a slot without a token.
    """
    logits = torch.linspace(-4, 6, HEADS * 11).sin().mul(40).view(HEADS, 11)
    v = torch.linspace(1, 9, HEADS * 11 * LANES).cos().view(HEADS, 11, LANES)
    logits[:, 8:] = -INF
    v[:, 8:] = 7.0
    for cuts in ((4, 4, 3), (2, 9), (8, 3), (1,) * 11):
        state: Any = torch.full((HEADS,), -INF), torch.zeros(HEADS), torch.zeros(HEADS, LANES)
        seen: list[State] = []
        for wave, (x, v_wave) in enumerate(zip(logits.split(cuts, 1), v.split(cuts, 1)), 1):
            case = f"wave {wave} of {x.shape[1]} slots"
            if (x == -INF).all():
                case += " without a token"
            state = called(function, *state, x, v_wave, case=case)
            seen.append(_state_of(x, v_wave))
            _judge(state, seen, case)
            state = tuple(state)
    return "right"


def merge_as_product(function: Function) -> str:
    """Merge all partitions in one product.

    function(m, sums) -> (num_heads, head_size), with m (num_heads, partitions) and sums
    (num_heads, partitions, head_size + 1): a partition's undivided sum of values, relative to its
    m, and in the last column its sum of exponentials.
    """
    for parts in (4, 1, 6):
        case = f"{parts} partition" + "s" * (parts > 1)
        states = [_state(2 + 3 * p, 5.0 * ((3 * p) % 4)) for p in range(parts)]
        if parts == 6:
            case += ", one of them empty"
            states[2] = torch.full((HEADS,), -INF), torch.zeros(HEADS), torch.zeros(HEADS, LANES)
        m = torch.stack([state[0] for state in states], 1)
        sums = torch.stack([torch.cat([acc, s[:, None]], 1) for _, s, acc in states], 1)
        wrong = {
            (HEADS, LANES + 1): "the last column is the denominator: divide by it, and drop it",
            (HEADS, 1, LANES): "the product's one row is a dimension still",
            (HEADS, parts, LANES): "the partitions were not added up",
        }
        got = tensor_of(called(function, m, sums, case=case), (HEADS, LANES), case, wrong)
        right, _ = _merged(states)
        if close(got, right):
            continue
        scale = torch.exp(m - m.amax(1, keepdim=True)).double()
        acc, s = sums.double()[..., :LANES], sums.double()[..., LANES]
        total = (scale[..., None] * acc).sum(1)
        mistakes = {
            "the partitions' maxima are forgotten: their sums are relative to different ones": (
                acc.sum(1) / s.sum(1, keepdim=True)
            ),
            "nothing was divided by the denominator": total,
            "s was multiplied in once more: acc holds it already": (
                (scale[..., None] * s[..., None] * acc).sum(1) / (scale * s).sum(1, keepdim=True)
            ),
            "the denominators were added without their factors": total / s.sum(1, keepdim=True),
        }
        for words, mistake in mistakes.items():
            if close(got, mistake):
                raise Misunderstood(f"{words} ({case})")
        raise Misunderstood(f"the result is {_nan_or_wrong(got)} for {case}")
    m, sums = torch.ones(HEADS, 4), torch.ones(HEADS, 4, LANES + 1)
    counts = count(lambda: function(m, sums))
    if counts.gemms != 1 or counts.ops > 5:
        return (
            f"right, in {counts.ops} operations and {counts.gemms} GEMMs: "
            "five are enough, with one GEMM for both sums"
        )
    return f"right, in {counts.ops} operations"


def _state(tokens: int, middle: float) -> State:
    """The state of some tokens whose logits lie around `middle`."""
    x = middle + torch.linspace(-1, 2, HEADS * tokens).view(HEADS, tokens).cos()
    v = torch.linspace(1, 4 + middle / 50, HEADS * tokens * LANES).sin()
    return _state_of(x, v.view(HEADS, tokens, LANES))


def _state_of(x: Tensor, v: Tensor) -> State:
    m = x.amax(1)
    weights = torch.exp(x - m.clamp_min(-1e30)[:, None])
    return m, weights.sum(1), torch.bmm(weights[:, None], v).squeeze(1)


def _merged(states: list[State]) -> tuple[Tensor, Tensor]:
    """(acc / s, m + log s) of all of them together, in float64."""
    lse = torch.stack([m.double() + s.double().log() for m, s, _ in states])
    outs = [acc.double() / s.double().clamp_min(1e-300)[:, None] for _, s, acc in states]
    shares = torch.softmax(lse, 0).nan_to_num(0.0)
    return (shares[..., None] * torch.stack(outs)).sum(0), lse.logsumexp(0)


def _parts_of(result: Any, case: str) -> State:
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise Misunderstood("it should return three tensors: m, s and acc")
    named = zip(("m", "s", "acc"), result, ((HEADS,), (HEADS,), (HEADS, LANES)))
    m, s, acc = (tensor_of(x, shape, f"{name}, {case}", {}) for name, x, shape in named)
    return m, s, acc


def _judge(result: Any, states: list[State], case: str) -> None:
    """Raise what is misunderstood about the state that should hold all of `states`."""
    m, s, acc = _parts_of(result, case)
    right, lse = _merged(states)
    if close(acc / s[:, None], right) and close(m + s.log(), lse):
        return
    if acc.isnan().any() or s.isnan().any() or s.isinf().any():
        if any((x[0] > 100).any() for x in states):
            raise Misunderstood(f"inf or NaN for {case}: e^m itself doesn't fit a float32")
        raise Misunderstood(f"NaN for {case}: -inf - -inf is NaN, and so is 0 times inf")
    if close(acc, right):
        raise Misunderstood(f"acc is divided already for {case}: leave it a sum, and divide last")
    *before, (m_b, s_b, acc_b) = states
    if close(s, sum((x[1] for x in before), s_b).double()):
        raise Misunderstood(
            f"the sums are added as they are for {case}: each is relative to its own maximum, so "
            "bring both to the larger one first"
        )
    if close(acc, sum((x[2] for x in before), acc_b).double()):
        raise Misunderstood(f"s is brought to the larger maximum for {case}, and acc isn't")
    if close(acc / s[:, None], acc_b.double() / s_b.double()[:, None]):
        raise Misunderstood(f"only the newest state is left for {case}: the others are forgotten")
    if close(m + s.log(), lse):
        raise Misunderstood(f"m and s are right for {case}, and acc isn't brought along")
    if close(acc / s[:, None], right):
        raise Misunderstood(f"acc / s is right for {case}, and m isn't what they are relative to")
    raise Misunderstood(f"the merged sums are wrong for {case}")


def _nan_or_wrong(got: Tensor) -> str:
    return "NaN" if got.isnan().any() else "wrong"
