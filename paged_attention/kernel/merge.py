"""Phase 2: the state of a partial softmax, and the merge of many states into one.

Attention over a set of keys is a reduction. What a partition has seen is kept as a *state*

    m     the largest logit                          (-inf when no key was seen)
    s     sum of exp(logit - m)                      (0 when no key was seen)
    acc   sum of exp(logit - m) * value              (0 when no key was seen)

Unnormalised, float32; acc and s lie side by side as one matrix, [acc | s], that one GEMM reduces.
(What pads it to `aligned` columns is never looked at.)

Two states merge by bringing both to the larger maximum and adding. The merge is associative and
commutative, and the empty state (-inf, 0, 0) is its identity, so a sequence may be cut anywhere
and its parts merged in any tree. A finished state is (out, lse) with out = acc / s and
lse = m + ln(s); (out, 1, lse) read as (acc, s, m) is again a state, so finished results merge too.
"""

import math

import torch

LOWEST = torch.finfo(torch.float32).min  # the m of an empty state: may be subtracted from itself


def aligned(columns):
    """So many columns of float32, or a few more, so that each row of a matrix begins at a multiple
    of 16 bytes: where one doesn't, MKL may add in another order (on an AMD CPU it does), and bits
    would depend on which row or which matrix of a batch it is."""
    return -(-columns // 4) * 4


@torch.no_grad()
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
    num_states, rows, head_size = len(outs), math.prod(outs.shape[1:-1]), outs.shape[-1]
    lses = lses.float().reshape(num_states, rows).t()  # (rows, num_states)
    acc = outs.float().reshape(num_states, rows, head_size).transpose(0, 1)
    seen = lses != -torch.inf
    acc_s = acc.new_zeros(rows, num_states, aligned(head_size + 1))
    acc_s[..., :head_size] = acc.masked_fill(~seen.unsqueeze(-1), 0.0)
    acc_s[..., head_size] = seen
    merged, m = acc_s.new_zeros(rows + 1, 1, acc_s.shape[-1]), lses.new_full((rows,), LOWEST)
    if acc_s.numel():
        lses = lses.clamp(min=LOWEST)
        merge_rows(acc_s, lses, torch.empty_like(lses), merged, m)
    lse = lses.new_empty(outs.shape[1:-1])
    out = finish(merged[:-1, 0, :head_size], merged[:-1, 0, head_size], m, lse.view(rows))
    return out.to(outs.dtype).view(outs.shape[1:]), lse


def merge_rows(acc_s, m, weights, out_acc_s, out_m):
    """Merge each row's states into one, writing to memory that is there already.

    The merge of a segmented reduction: a row is one sequence and query head, its states are
    adjacent, and rows of equally many states come together, so that nothing is padded.

    Args:    acc_s: (rows, num_states, aligned(head_size + 1)), reduced by one GEMM
             m: (rows, num_states), finite or NaN;  weights: like m, overwritten
             out_acc_s: (rows, 1, as acc_s), in memory for two rows at least;  out_m: (rows,)
    """
    if m.shape[1] == 1:  # SingleTile
        out_acc_s[: len(m)].copy_(acc_s)
        out_m.copy_(m.squeeze(1))
        return
    torch.amax(m, 1, out=out_m)
    torch.sub(m, out_m.unsqueeze(1), out=weights).exp_()
    batched_gemm(weights.unsqueeze(1), acc_s, out_acc_s)


def batched_gemm(a, b, out):
    """a @ b for each matrix of a batch, into the first of out's, which has room for two at least.

    MKL takes another path for a batch of one, and gives other bits, than for the same matrices in
    a longer batch. So that bits do not depend on what else is in a batch, one is computed twice.
    """
    num = a.shape[0]  # len(a), which is slower
    if num == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1), out=out[:2])[:1]
    return torch.bmm(a, b, out=out if out.shape[0] == num else out[:num])


def merge_sink(acc, s, m, sinks, new_m, weight):
    """Merge one more state into each, that of a key whose logit is the sink and whose value is 0.

    Args:    acc: (..., head_size), s and m: (...), overwritten
             sinks: broadcasts to m, finite or -inf;  new_m, weight: like m, overwritten
    Returns: m, the new one
    """
    torch.maximum(m, sinks, out=new_m)
    s.mul_(m.sub_(new_m).exp_()).add_(torch.sub(sinks, new_m, out=weight).exp_())
    acc.mul_(m.unsqueeze(-1))
    return new_m


def finish(acc, s, m, lse):
    """The result of a state: acc / s, and m + ln s; exactly (0, -inf) where no key was seen.

    Args:    acc: (..., head_size) and s: (...), overwritten;  m: (...)
             lse: like m, where m + ln s is to be written, or None
    Returns: out: (..., head_size), in acc's place
    """
    if lse is not None:
        torch.log(s, out=lse).add_(m)
    # An s that isn't 0 is 1 or more: its largest term is exp(0).
    return acc.div_(s.clamp_(min=1.0).unsqueeze(-1))


def _check_states(outs, lses):
    for name, tensor in (("outs", outs), ("lses", lses)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise TypeError(
                f"{name} must be floating and dense, got {tensor.dtype}, {tensor.layout}"
            )
    if outs.dim() < 3 or outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"lses must be (num_states, ..., num_heads) for outs (num_states, ..., num_heads, "
            f"head_size), got lses {tuple(lses.shape)} for outs {tuple(outs.shape)}"
        )
    if outs.device != lses.device:
        raise ValueError(f"lses must be on {outs.device} like outs, got {lses.device}")
