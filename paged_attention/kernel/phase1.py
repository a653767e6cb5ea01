"""Phase 1: partitions become states, a wave of them at a time, in memory that is used again."""

import torch
from torch import Tensor

from .call import Call
from .fp8 import element_dtype
from .gather import cache_rows, gather, select
from .gemm import batched_gemm, padded, room_for
from .mask import adjust, hide_values, wave_mask, wave_slopes
from .merge import LOWEST
from .schedule import Wave
from .step import Step


def phase1(step: Step, call: Call, lens: Tensor | None) -> None:
    """The states of all work items, into the buffers acc_s and m.

    Args:    lens: (num_seqs,), int64, overwritten: the true lengths, for a capacity schedule
    """
    schedule, options, buffers = step
    shape, (_, key_cache, value_cache, block_tables, _) = schedule.shape, call.inputs
    dtype = element_dtype(key_cache.dtype, call.kv_cache_dtype)
    if dtype.itemsize == 1:  # bytes are moved as bytes
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    keys, values = cache_rows(step, key_cache, value_cache, call.layout)
    if lens is None:
        tokens_to_end = schedule.items.tokens_to_end
        block_ids = _block_ids(step, block_tables, schedule.block_columns)
    else:
        tokens_to_end, block_ids = _read_lengths(step, block_tables, lens)
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = buffers.slopes(len(slopes)).copy_(slopes).view(-1, 1, 1)

    acc, m = buffers.acc_s(*buffers.acc_s.shape, columns=shape.head_size), buffers.m()
    s = buffers.acc_s()[:, shape.head_size : shape.head_size + 1]
    for wave in schedule.waves:
        mask = wave_mask(step, wave, tokens_to_end)
        ids = block_ids[wave.blocks].view(wave.num_items, 1, -1, 1)
        logits = _logits(step, wave, gather(step, keys, ids, dtype))
        adjust(logits, mask, options.softcap, wave_slopes(step, wave, slopes))
        weights = _softmax(step, wave, logits)
        v = gather(step, values, ids, dtype)  # where K was, which is no longer needed
        hide_values(v, mask)
        wave_acc = buffers.wave_acc(room_for(len(v)), wave.group, shape.lanes)
        batched_gemm(weights, v, wave_acc)  # reads weights and V
        # Each reads its part of the wave's states and writes it where Phase 2 wants it.
        rows = len(wave.state_rows)
        wave_acc = buffers.wave_acc(rows, shape.lanes, columns=shape.head_size)
        acc.index_copy_(0, wave.state_rows, wave_acc)
        s.index_copy_(0, wave.state_rows, buffers.wave_s(rows, 1))
        m.index_copy_(0, wave.state_rows, buffers.wave_m(rows))


def _logits(step: Step, wave: Wave, k: Tensor) -> Tensor:
    """The products of a wave's queries and keys.

    A matrix is a pair of work item and KV head. Its rows are the query heads that share the KV
    head and, of each of them, the query tokens. So K is used as it was gathered, never expanded.
    Where sequences share a partition, a matrix has the rows of all of them.

    Args:    k: (matrices, width, lanes)
    Returns: (matrices, group, width)
    """
    schedule, _, buffers = step
    shape = schedule.shape
    # A sequence's rows stand together, but those of a shared wave one by one.
    wanted, rows = wave.seqs, shape.num_rows
    if wave.sharing is not None:
        wanted, rows = wave.sharing.rows, 1
    query = buffers.query(schedule.num_seqs * (shape.num_rows // rows), rows, shape.lanes)
    wave_query = buffers.wave_query(len(wanted), rows, shape.lanes)
    select(query, wanted, wave_query)  # reads and writes the queries of each item
    matrices = len(k)
    q = buffers.wave_query(matrices, wave.group, shape.lanes, columns=shape.head_size)
    # The columns past the width are products with whatever lies behind these keys. Nobody reads
    # them.
    columns = padded(wave.width)
    of_matrix, of_token, of_lane = k.stride()
    k_t = k.as_strided((matrices, shape.head_size, columns), (of_matrix, of_lane, of_token))
    logits = buffers.logits(room_for(matrices), wave.group, columns)
    batched_gemm(q, k_t, logits)  # reads queries and K, writes a float a row and token
    return buffers.logits(matrices, wave.group, columns, columns=wave.width)


def _softmax(step: Step, wave: Wave, logits: Tensor) -> Tensor:
    """The weights exp(logit - m), in the logits' place. Their sum is written to wave_s, m to
    wave_m."""
    schedule, _, buffers = step
    matrices, group, _ = logits.shape
    m = torch.amax(logits, -1, keepdim=True, out=buffers.wave_m(matrices, group, 1))
    # Where all logits are -inf, m becomes LOWEST, so that their exp is 0 and not NaN.
    weights = logits.sub_(m.clamp_(min=LOWEST)).exp_()  # each reads and writes the logits
    ones = schedule.ones[: wave.width].expand(matrices, -1, -1)
    batched_gemm(weights, ones, buffers.wave_s(room_for(matrices), group, 1))
    return weights


def _block_ids(step: Step, block_tables: Tensor, columns: Tensor) -> Tensor:
    """(blocks,), int64: the ids of all blocks, in the order of the waves.

    Args:    columns: (blocks,), int64, where each block's id stands in its sequence's row
    """
    schedule, buffers = step.schedule, step.buffers
    places, ids = buffers.table_places(), buffers.block_ids()
    torch.add(columns, schedule.block_seqs, alpha=block_tables.shape[1], out=places)
    table_ids = buffers.table_ids(len(ids), dtype=block_tables.dtype)
    torch.take(block_tables, places, out=table_ids)
    return ids.copy_(table_ids)


def _read_lengths(step: Step, block_tables: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens_to_end and block ids for a capacity schedule, whose lengths are on the device.

    The ids past a sequence's end are replaced by 0. Block 0 is read there, and masked. With a
    window, the schedule's blocks are counted from the first block that the sequence needs.

    Args:    lens: (num_seqs,), int64, overwritten
    """
    schedule, buffers = step.schedule, step.buffers
    shape, block_size = schedule.shape, schedule.shape.block_size
    columns = schedule.block_columns
    if shape.window is not None:
        first = torch.sub(lens, shape.window + shape.q_len - 1, out=buffers.first_blocks())
        first.clamp_(min=0).div_(block_size, rounding_mode="floor")  # tokens, and now blocks
        lens.sub_(first, alpha=block_size)  # tokens from there on
        columns = select(first, schedule.block_seqs, buffers.columns()).add_(columns)
    columns = torch.clamp(columns, max=block_tables.shape[1] - 1, out=buffers.columns())
    block_ids = _block_ids(step, block_tables, columns)
    starts = torch.mul(schedule.block_columns, block_size, out=buffers.block_starts())
    ends = select(lens, schedule.block_seqs, buffers.seq_ends())
    block_ids.masked_fill_(torch.ge(starts, ends, out=buffers.past_end()), 0)
    to_end = select(lens, schedule.items.seqs, buffers.tokens_to_end())
    return to_end.sub_(schedule.items.starts), block_ids
