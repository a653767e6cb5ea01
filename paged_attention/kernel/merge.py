"""The state of a partial softmax, and the merge of many states into one.

Attention over a set of keys is a reduction. What a partition has seen is kept as a *state*:

    m     the largest logit                          (-inf when no key was seen)
    s     sum of exp(logit - m)                      (0 when no key was seen)
    acc   sum of exp(logit - m) * value              (0 when no key was seen)

States are float32, and an m of -inf is kept as LOWEST. acc and s lie side by side as one matrix,
[acc | s], so that one matrix product reduces both. Columns that only align the rows may hold
anything.

Two states merge by bringing both to the larger maximum and adding. The merge is associative and
commutative, and the empty state (-inf, 0, 0) is its identity. So a sequence may be cut anywhere,
and its parts may be merged in any tree. A finished state is (out, lse) with out = acc / s and
lse = m + ln(s). Read as (acc, s, m) = (out, 1, lse) it is a state again, so that finished results
merge, too.
"""

import math

import torch
from torch import Tensor

from .checks import refuse, require_floating
from .gemm import batched_gemm, padded

LOWEST = torch.finfo(torch.float32).min  # the m of an empty state, because -inf - -inf is NaN


@torch.no_grad()
def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge finished attention states over disjoint sets of keys into one.

    Args:    outs: (num_states, ..., num_heads, head_size), a floating dtype
             lses: (num_states, ..., num_heads), natural log. -inf marks a state that saw no key,
                   and its `outs` entry is ignored, whatever it holds
    Returns: out: (..., num_heads, head_size), the dtype of outs, accumulated in float32
             lse: (..., num_heads), float32
             No states at all give (0, -inf)
    Raises:  TypeError, ValueError: outs or lses are not floating tensors, their shapes don't
             match, or they lie on different devices. Values are not read. An lse of +inf or NaN
             is a mistake of whoever made it, and the result is NaN, never a plausible number
    Numbers: a sum of outs beyond float32's range overflows, and so does such an lse
    Cost:    reads outs and lses once, writes two float32 copies of outs
    Source:  FlashInfer docs/tutorials/recursive_attention.rst (merge of attention states);
             vLLM attention_kernels.cuh, paged_attention_v2_reduce_kernel
    Example: one head of one lane. 1.0 is the mean of 3 tokens, and 5.0 is 1 token's.
        >>> outs, lses = torch.tensor([[[1.0]], [[5.0]]]), torch.tensor([[3.0], [1.0]]).log()
        >>> merge_states(outs, lses)
        (tensor([[2.]]), tensor([1.3863]))
    """
    _check_states(outs, lses)
    num_states, rows, head_size = len(outs), math.prod(outs.shape[1:-1]), outs.shape[-1]
    lses = lses.float().reshape(num_states, rows).t()  # (rows, num_states)
    acc = outs.float().reshape(num_states, rows, head_size).transpose(0, 1)
    seen = lses != -torch.inf
    acc_s = acc.new_zeros(rows, num_states, padded(head_size + 1))
    acc_s[..., :head_size] = acc.masked_fill(seen.logical_not().unsqueeze(-1), 0.0)
    acc_s[..., head_size] = seen
    merged, m = acc_s.new_zeros(rows + 1, 1, acc_s.shape[-1]), lses.new_full((rows,), LOWEST)
    if acc_s.numel():
        lses = lses.clamp(min=LOWEST)
        merge_rows(acc_s, lses, torch.empty_like(lses), merged, m)
    lse = lses.new_empty(outs.shape[1:-1])
    out = finish(merged[:-1, 0, :head_size], merged[:-1, 0, head_size], m, lse.view(rows))
    return out.to(outs.dtype).view(outs.shape[1:]), lse


def merge_rows(
    acc_s: Tensor, m: Tensor, weights: Tensor, out_acc_s: Tensor, out_m: Tensor
) -> None:
    """Merge each row's states into one, in memory that is there already.

    Args:    acc_s: (rows, num_states, padded(head_size + 1))
             m: (rows, num_states), finite or NaN;  weights: like m, overwritten
             out_acc_s: (room_for(rows) or more, 1, as acc_s);  out_m: (rows,)
    """
    torch.amax(m, 1, out=out_m)  # reads m
    torch.sub(m, out_m.unsqueeze(1), out=weights).exp_()  # reads m, writes weights twice
    batched_gemm(weights.unsqueeze(1), acc_s, out_acc_s)  # reads acc_s once


def merge_sink(
    acc: Tensor, s: Tensor, m: Tensor, sinks: Tensor, new_m: Tensor, weight: Tensor
) -> Tensor:
    """Merge a sink into each state, as a key whose logit is the sink and whose value is 0.

    Args:    acc: (..., head_size), s and m: (...), overwritten
             sinks: broadcasts to m, finite or -inf
             new_m, weight: like m, overwritten
    Returns: m, the new one
    """
    torch.maximum(m, sinks, out=new_m)
    s.mul_(m.sub_(new_m).exp_()).add_(torch.sub(sinks, new_m, out=weight).exp_())
    acc.mul_(m.unsqueeze(-1))
    return new_m


def finish(acc: Tensor, s: Tensor, m: Tensor, lse: Tensor | None) -> Tensor:
    """The result of a state, acc / s and m + ln s. It is exactly (0, -inf) where s is 0.

    Args:    acc: (..., head_size) and s: (...), overwritten;  m: (...)
             lse: like m, where m + ln s is written, or None
    Returns: out: (..., head_size), in acc's place
    """
    if lse is not None:
        torch.log(s, out=lse).add_(m)
    # An s that isn't 0 is 1 or more, because its largest term is exp(0).
    return acc.div_(s.clamp_(min=1.0).unsqueeze(-1))


def _check_states(outs: Tensor, lses: Tensor) -> None:
    require_floating("outs", outs)
    require_floating("lses", lses)
    if outs.dim() < 3 or outs.shape[:-1] != lses.shape:
        rule = "(num_states, ..., num_heads) for outs (num_states, ..., num_heads, head_size)"
        refuse("lses", rule, f"lses {tuple(lses.shape)} for outs {tuple(outs.shape)}")
    if outs.device != lses.device:
        refuse("lses", f"on {outs.device} like outs", lses.device)
