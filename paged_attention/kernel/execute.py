"""Running a schedule: Phase 1 wave by wave, Phase 2 over all states, the result.

The only loops are over waves and segments. Nothing is read back to the host, and every operation
writes to a buffer that is there already.
"""

import torch

from paged_attention.kernel.fp8 import meaning_of
from paged_attention.kernel.gather import rows_of
from paged_attention.kernel.merge import LOWEST, finish, merge_sink
from paged_attention.kernel.phase1 import phase1
from paged_attention.kernel.phase2 import phase2
from paged_attention.kernel.states import all_states


@torch.no_grad()
def run(schedule, options, inputs, layout, kv_cache_dtype, views, out, lse):
    """One decode step.

    Args:    inputs: query, key_cache, value_cache, block_tables, seq_lens, checked; seq_lens is
                   read by a static schedule only
             views: of the schedule's buffers, whatever they hold
             out: query's shape;  lse: out.shape[:-1], float32, or None
    """
    query, key_cache, value_cache, block_tables, seq_lens = inputs
    _scaled_query(schedule.heads, query, options, views)
    lens = too_long = None
    if schedule.static:
        lens = views("seq_lens", schedule.num_seqs).copy_(seq_lens)
        covered = block_tables.shape[1] * schedule.heads.block_size if key_cache.numel() else 0
        most = min(schedule.longest, covered)
        too_long = torch.gt(lens, most, out=views("too_long", schedule.num_seqs))
    if schedule.waves and key_cache.numel() and block_tables.numel():
        meaning = meaning_of(key_cache.dtype, kv_cache_dtype)
        if meaning.itemsize == 1:  # bytes are moved as bytes
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        caches = rows_of(key_cache, value_cache, layout)
        phase1(schedule, options, caches, meaning, block_tables, lens, views)
    else:  # no tokens, or no memory that could hold any: states of nothing
        acc_s, m = all_states(schedule, views)
        acc_s.zero_()
        m.fill_(LOWEST)
    acc_s, m = phase2(schedule, views)
    _write_result(schedule.heads, options, acc_s, m, too_long, views, out, lse)


def _scaled_query(heads, query, options, views):
    """The queries in float32, a sequence's rows in the order (query head, query token), times the
    scale of the logits, and of the keys."""
    scaled = views("query", len(query), heads.num_heads, heads.q_len, heads.lanes)
    scaled = scaled[..., : heads.head_size]
    scale, k_scale = options.scale, options.k_scale
    if not isinstance(k_scale, torch.Tensor):  # as one number: each alone may be out of range
        scale, k_scale = scale * k_scale, 1.0
    scaled.copy_(_by_head(query, 3)).mul_(scale)
    _multiply(heads, scaled, k_scale, views)


def _by_head(tensor, rank):
    """(num_seqs, num_heads, q_len, ...), a view of a query, an output, or (rank 2) an lse."""
    return (tensor.unsqueeze(1) if tensor.dim() == rank else tensor).transpose(1, 2)


def _multiply(heads, rows, scale, views):
    """rows *= scale, a number or one for each KV head.

    Args:    rows: (num_seqs, num_heads, q_len, head_size)
    """
    if isinstance(scale, torch.Tensor):
        scale = views("scale", heads.num_kv_heads).copy_(scale).view(-1, 1, 1, 1)
        rows.unflatten(1, (heads.num_kv_heads, -1)).mul_(scale)
    elif scale != 1.0:
        rows.mul_(scale)


def _write_result(heads, options, acc_s, m, too_long, views, out, lse):
    """out = acc / s * v_scale and lse = m + ln s, or (0, -inf) where no key was seen, or NaN where
    a sequence is too_long for its plan or its table: a part of it would pass for all of it."""
    shape = len(m), heads.num_heads, heads.q_len
    acc_s, m = acc_s.view(*shape, acc_s.shape[-1]), m.view(shape)
    acc, s = acc_s[..., : heads.head_size], acc_s[..., heads.head_size]
    if options.sinks is not None:
        sinks = views("sinks", heads.num_heads).copy_(options.sinks).unsqueeze(1)
        m = merge_sink(acc, s, m, sinks, views("sink_m", *shape), views("sink_s", *shape))
    empty = torch.eq(s, 0, out=views("empty", *shape)).unsqueeze(-1)
    result = finish(acc, s, m, None if lse is None else _by_head(lse, 2))
    _multiply(heads, result, options.v_scale, views)
    result.masked_fill_(empty, 0.0)  # a scale times 0 may be NaN
    if too_long is not None:
        result.masked_fill_(too_long.view(-1, 1, 1, 1), torch.nan)
        if lse is not None:
            lse.masked_fill_(too_long.view(-1, *[1] * (lse.dim() - 1)), torch.nan)
    _by_head(out, 3).copy_(result)
