"""One run of a schedule: Phase 1 wave by wave, Phase 2 over all states, the result.

The only loops are over waves and segments. Nothing is read back to the host, and every operation
writes to a buffer that is there already.
"""

import torch
from torch import Tensor

from .call import Call
from .merge import LOWEST, finish, merge_sink
from .phase1 import phase1
from .phase2 import phase2
from .step import Step
from .workspace import Buffer


@torch.no_grad()
def execute(step: Step, call: Call, out: Tensor, lse: Tensor | None) -> None:
    """One decode step.

    Args:    out: query's shape;  lse: out.shape[:-1], float32, or None
    """
    schedule, _, buffers = step
    query, key_cache, _, block_tables, seq_lens = call.inputs
    _scale_query(step, query)
    lens = too_long = None
    if schedule.is_capacity:
        lens = buffers.seq_lens().copy_(seq_lens)
        # What both the plan and the table can serve:
        most = min(schedule.longest, call.covered if key_cache.numel() else 0)
        too_long = torch.gt(lens, most, out=buffers.too_long())
    if schedule.waves and key_cache.numel() and block_tables.numel():
        phase1(step, call, lens)
    else:  # no tokens, or no memory that could hold any
        buffers.acc_s().zero_()
        buffers.m().fill_(LOWEST)
    _write_result(step, phase2(step), too_long, out, lse)


def _scale_query(step: Step, query: Tensor) -> None:
    """The queries in float32, times the scale of the logits and of the keys.

    The two scales become one number first, because each alone may be out of float32's range. The
    rows of a sequence are in the order (query head, query token).
    """
    shape, options = step.schedule.shape, step.options
    size = len(query), shape.num_heads, shape.q_len, shape.lanes
    scaled = step.buffers.query(*size, columns=shape.head_size)
    factor = options.k_scale
    if isinstance(factor, Tensor):
        factor = step.buffers.factor(shape.num_kv_heads).copy_(factor)
    assert options.scale is not None
    factor *= options.scale
    scaled.copy_(_by_head(query, 3))  # reads query, writes its copy
    _multiply(step, scaled, factor)  # reads and writes the copy


def _write_result(
    step: Step,
    states: tuple[Buffer, Buffer],
    too_long: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """out = acc / s * v_scale and lse = m + ln s, or (0, -inf) where no key was seen.

    A sequence that is too_long for its plan or its table becomes NaN, because a part of its
    attention would pass for all of it.
    """
    shape, options, buffers = step.schedule.shape, step.options, step.buffers
    size = step.schedule.num_seqs, shape.num_heads, shape.q_len
    acc_s, m = states[0], states[1](*size)
    acc = acc_s(*size, shape.state_columns, columns=shape.head_size)
    s = acc_s(*size, shape.state_columns)[..., shape.head_size]
    if options.sinks is not None:
        sinks = buffers.sinks(shape.num_heads).copy_(options.sinks).unsqueeze(1)
        m = merge_sink(acc, s, m, sinks, buffers.sink_m(*size), buffers.sink_weight(*size))
    no_keys = torch.eq(s, 0, out=buffers.no_keys(*size)).unsqueeze(-1)
    result = finish(acc, s, m, None if lse is None else _by_head(lse, 2))
    _multiply(step, result, options.v_scale)
    result.masked_fill_(no_keys, 0.0)  # a scale times 0 may be NaN
    if too_long is not None:
        result.masked_fill_(too_long.view(-1, 1, 1, 1), torch.nan)
        if lse is not None:
            lse.masked_fill_(too_long.view(-1, *[1] * (lse.dim() - 1)), torch.nan)
    _by_head(out, 3).copy_(result)


def _by_head(tensor: Tensor, rank: int) -> Tensor:
    """(num_seqs, num_heads, q_len, ...), a view of a query or an output, or of an lse (rank 2).

    Args:    rank: of a tensor without q_len
    """
    return tensor.unsqueeze(2) if tensor.dim() == rank else tensor.transpose(1, 2)


def _multiply(step: Step, rows: Tensor, scale: float | Tensor) -> None:
    """rows *= scale, which is a number or one for each KV head.

    Args:    rows: (num_seqs, num_heads, q_len, head_size)
    """
    if isinstance(scale, Tensor):
        kv_heads = step.schedule.shape.num_kv_heads
        scale = step.buffers.scale(kv_heads).copy_(scale).view(-1, 1, 1, 1)
        rows.unflatten(1, (kv_heads, -1)).mul_(scale)
    elif scale != 1.0:
        rows.mul_(scale)
