"""Phase 2: the state of a partial softmax, and the merge of many states into one.

Attention over a set of keys is a reduction. What a partition has seen is kept as a *state*

    m     the largest logit                          (-inf when no key was seen)
    s     sum of exp(logit - m)                      (0 when no key was seen)
    acc   sum of exp(logit - m) * value              (0 when no key was seen)

Two states merge by bringing both to the larger maximum and adding. The merge is associative and
commutative, and the empty state (-inf, 0, 0) is its identity, so a sequence may be cut anywhere
and its parts merged in any tree. A finished state is (out, lse) with out = acc / s and
lse = m + ln(s); (out, 1, lse) read as (acc, s, m) is again a state, so finished results merge too.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch

LOWEST = torch.finfo(torch.float32).min  # the m of an empty state that is to be subtracted


class State(NamedTuple):
    """A partial softmax, unnormalised, float32."""

    acc: torch.Tensor  # (..., num_heads, head_size)
    s: torch.Tensor  # (..., num_heads)
    m: torch.Tensor  # (..., num_heads)


def merge_states(outs, lses):
    """Merge finished attention states over disjoint sets of keys into one.

    Args:    outs: (num_states, ..., num_heads, head_size), a floating dtype
             lses: (num_states, ..., num_heads), natural log; -inf marks a state that saw no key,
                   whose `outs` entry is ignored whatever it holds
    Returns: out: (..., num_heads, head_size), the dtype of outs, accumulated in float32
             lse: (..., num_heads), float32
             No states at all give (0, -inf).
    Raises:  TypeError, ValueError: outs or lses are not floating tensors, their shapes don't
             match, or they lie on different devices. Values are not read: an lse of +inf or NaN
             is a producer's error and comes out as NaN, never as a plausible number.
    Numbers: a sum of outs that exceeds float32's range overflows, as does an lse that does
    Cost:    reads outs and lses once, writes two float32 copies of outs
    Source:  FlashInfer, "recursive attention" (merge of attention states);
             vLLM attention_kernels.cuh, paged_attention_v2_reduce_kernel
    """
    _check_states(outs, lses)
    lses = lses.float()
    seen = lses != -torch.inf
    acc = outs.float().masked_fill(~seen.unsqueeze(-1), 0.0)
    with float32_math(outs.device):
        out, lse = finish(merge(State(acc, seen.float(), lses)))
    return out.to(outs.dtype), lse


def merge(states):
    """Merge the states along dimension 0 into one (the empty state, if there are none).

    The values and the sum of exponentials are reduced by one and the same bmm, [acc | s] as one
    matrix, weighted by exp(m - max m).
    """
    num_states, shape, head_size = len(states.m), states.m.shape[1:], states.acc.shape[-1]
    if num_states == 0:
        like = states.acc
        return State(
            like.new_zeros(*shape, head_size),
            like.new_zeros(shape),
            like.new_full(shape, -torch.inf),
        )
    m = states.m.amax(dim=0)  # (...)
    weights = torch.exp(states.m - finite(m))  # (num_states, ...), 0 for an empty state
    acc_s = torch.cat([states.acc, states.s.unsqueeze(-1)], dim=-1)
    merged = torch.bmm(  # (rows, 1, head_size + 1), rows = the product of (...)
        weights.reshape(num_states, -1).t().unsqueeze(1),
        acc_s.reshape(num_states, -1, head_size + 1).transpose(0, 1),
    ).reshape(*shape, head_size + 1)
    return State(merged[..., :-1], merged[..., -1], m)


def merge_rows(acc_s, m, out_acc_s, out_m):
    """Merge each row's states into one, writing to memory that is there already.

    The merge of a segmented reduction: a row is one sequence and query head, its states are
    adjacent, and rows of equally many states come together, so that nothing is padded.

    Args:    acc_s: (rows, num_states, head_size + 1), acc and s side by side, reduced by one GEMM
             m: (rows, num_states), finite or NaN, overwritten
             out_acc_s: (rows, 1, head_size + 1), in memory for two rows at least;  out_m: (rows,)
    """
    if m.shape[1] == 1:  # SingleTile
        out_acc_s[: len(m)].copy_(acc_s)
        out_m.copy_(m.squeeze(1))
        return
    torch.amax(m, 1, out=out_m)
    weights = m.sub_(out_m.unsqueeze(1)).exp_()  # (rows, num_states)
    batched_gemm(weights.unsqueeze(1), acc_s, out_acc_s)


def batched_gemm(a, b, out):
    """a @ b for each matrix of a batch, into the first of out's, which has room for two at least.

    MKL takes another path for a batch of one, and gives other bits, than for the same matrices in
    a longer batch. So that bits do not depend on what else is in a batch, one is computed twice.
    """
    batch = len(a)
    if batch == 1:
        a, b = a.expand(2, -1, -1), b.expand(2, -1, -1)
    return torch.bmm(a, b, out=out[: len(a)])[:batch]


def finish(state):
    """(out, lse) of a state: acc / s and m + ln(s); exactly (0, -inf) where no key was seen."""
    empty = state.s == 0
    out = state.acc / state.s.masked_fill(empty, 1.0).unsqueeze(-1)
    return out, state.m + torch.log(state.s)


def finite(m):
    """m with -inf replaced by 0, so that exp(-inf - m) is 0 and not NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def float32_math(device):
    """A context in which autocast, if the caller has it on, leaves GEMMs in float32."""
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _check_states(outs, lses):
    for name, tensor in (("outs", outs), ("lses", lses)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating, got {tensor.dtype}")
    if outs.dim() < 3 or outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"lses must be (num_states, ..., num_heads) for outs (num_states, ..., num_heads, "
            f"head_size), got lses {tuple(lses.shape)} for outs {tuple(outs.shape)}"
        )
    if outs.device != lses.device:
        raise ValueError(f"lses must be on {outs.device} like outs, got {lses.device}")
