"""vLLM's paged_attention_v1 and paged_attention_v2, by position and by name, on our kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attention.kernel.call import Call, Inputs, check_call, check_values, lengths_on_host
from paged_attention.kernel.checks import refuse, require_tensor, required_count
from paged_attention.kernel.options import Options
from paged_attention.kernel.partition import whole_blocks
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.shape import StepShape
from paged_attention.kernel.transforms import is_traced
from paged_attention.kernel.workspace import default_workspace
from paged_attention.vllm.choice import PARTITION_SIZE, is_capturing, partition_size
from paged_attention.vllm.head_mapping import check_num_kv_heads
from paged_attention.vllm.scales import CacheOptions, cache_options
from paged_attention.vllm.states import Scratch, check_scratch, write_states


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int | Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one new token per sequence, into `out`.

    Args:    out: (num_seqs, num_heads, head_size), query's dtype or float32
             query: (num_seqs, num_heads, head_size), fp32/fp16/bf16
             key_cache: (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
             value_cache: (num_blocks, num_kv_heads, head_size, block_size)
             num_kv_heads, block_size: the caches'. For num_kv_heads CoreX's vLLM passes a
                   head_mapping, (num_heads,), int32: each query head's KV head. It must be the
                   usual grouping, 0, 0, 0, 1, 1, 1 for 6 heads on 2
             block_tables: (num_seqs, max_blocks), seq_lens: (num_seqs,), int32/int64
             max_seq_len: tokens, at least the longest sequence
             alibi_slopes: None or (num_heads,), times (key position - query position)
             kv_cache_dtype: None or "auto" for caches that describe themselves. Their scales are
                   ignored, as vLLM ignores them. "fp8", "fp8_e4m3" or "fp8_e5m2" for caches of
                   uint8
             k_scale, v_scale: floats or tensors, which multiply cached keys and values. Finite,
                   and not 0
             tp_rank, blocksparse_*: block-sparse attention, which must be off
    Raises:  TypeError, ValueError: the argument, its value, and what it should be. On a CPU
                   lengths, block ids and scales are checked, too. Elsewhere that would cost a
                   synchronisation, so a sequence beyond max_seq_len or its table becomes NaN
    Cost:    as `paged_attention`. On an accelerator it follows num_seqs * max_seq_len, and
             nothing is read back, but a head_mapping in its first call
    Source:  vLLM vllm/_custom_ops.py, paged_attention_v1, 0.5.3 to 0.12. kv_cache_dtype and the
             scales may be missing, as in CoreX's vLLM 0.6.3
    """
    _refuse_blocksparse(
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_head_sliding_step
    )
    planned = _planned(
        Inputs(query, key_cache, value_cache, block_tables, seq_lens),
        out=out,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        max_seq_len=max_seq_len,
        scale=scale,
        alibi_slopes=alibi_slopes,
        cache=cache_options(kv_cache_dtype, k_scale, v_scale),
        partition_size=PARTITION_SIZE,
    )
    planned.plan.run_checked(planned.call, out, None, False)


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int | Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """As `paged_attention_v1`, in partitions whose states are left in the scratch tensors.

    `out` is merged from float32 states, so it is the same whatever dtype tmp_out has.

    Args:    exp_sum: (num_seqs, num_heads, num_partitions), float32. Of each partition the sum of
                   exp(logit - its max_logits)
             max_logits: like exp_sum. Each partition's largest logit, scaled, ALiBi included
             tmp_out: (num_seqs, num_heads, num_partitions, head_size), out's dtype or float32.
                   Each partition's attention, normalised
             num_partitions: at least max_seq_len in partitions of 512 tokens, or of
                   PAGED_ATTENTION_PARTITION_SIZE tokens, rounded up to whole blocks. Partitions
                   past a sequence's end are neither read nor written
    Source:  vLLM vllm/_custom_ops.py, paged_attention_v2; attention_kernels.cuh
    """
    _refuse_blocksparse(
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_head_sliding_step
    )
    planned = _planned(
        Inputs(query, key_cache, value_cache, block_tables, seq_lens),
        out=out,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        max_seq_len=max_seq_len,
        scale=scale,
        alibi_slopes=alibi_slopes,
        cache=cache_options(kv_cache_dtype, k_scale, v_scale),
        partition_size=partition_size(),
    )
    plan, call = planned
    scratch = Scratch(exp_sum, max_logits, tmp_out)
    check_scratch(scratch, out, max_seq_len, plan.partition_size)
    workspace = default_workspace(query.device)
    plan.run_checked(call, out, workspace, False)
    write_states(plan, workspace, seq_lens, call.options.v_scale, scratch)


class _Planned(NamedTuple):
    plan: DecodePlan
    call: Call


def _planned(
    inputs: Inputs,
    out: Tensor,
    num_kv_heads: int | Tensor,
    block_size: int,
    max_seq_len: int,
    scale: float,
    alibi_slopes: Tensor | None,
    cache: CacheOptions,
    partition_size: int,
) -> _Planned:
    """Check one step's arguments, but for its scratch, and plan it."""
    kv_cache_dtype, k_scale, v_scale = cache
    options = Options(scale=scale, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale)
    call = check_call(inputs, "vllm", kv_cache_dtype, options)
    query = inputs.query
    require_tensor("out", out)
    if query.dim() != 3:
        refuse("query", "(num_seqs, num_heads, head_size)", tuple(query.shape))
    check_num_kv_heads(num_kv_heads, query.shape[1], call.geometry.num_kv_heads)
    if required_count("block_size", block_size) != call.geometry.block_size:
        refuse("block_size", f"the caches' {call.geometry.block_size}", block_size)
    max_seq_len = required_count("max_seq_len", max_seq_len, least=0)
    if inputs.seq_lens.is_cpu and inputs.block_tables.is_cpu:
        lengths = lengths_on_host(call, max_seq_len)
        check_values(call, lengths)
        plan = DecodePlan.exact(
            call.shape, "vllm", query.device, lengths, partition_size=partition_size
        )
        return _Planned(plan, call)
    if is_capturing():
        raise RuntimeError(
            "vLLM's operations on this package can't be captured in a CUDA graph: "
            "enforce_eager must be True"
        )
    # Rounded up, so that the plan serves all layers, and as many steps as a partition has tokens.
    capacity = whole_blocks(max_seq_len, whole_blocks(partition_size, block_size))
    capacity = min(capacity, call.covered)
    make = _capacity_plan.__wrapped__ if is_traced(query) else _capacity_plan
    return _Planned(make(call.shape, query.device, len(query), capacity, partition_size), call)


@functools.lru_cache(maxsize=16)
def _capacity_plan(
    shape: StepShape, device: torch.device, num_seqs: int, capacity: int, partition_size: int
) -> DecodePlan:
    return DecodePlan.capacity(
        shape, "vllm", device, [capacity] * num_seqs, partition_size=partition_size
    )


def _refuse_blocksparse(local_blocks: int, vert_stride: int, head_sliding_step: int) -> None:
    """Raise unless block-sparse attention is off. A stride of 1 lets every block be seen, and a
    value of 0 or None is off."""
    if vert_stride == 1:
        return
    for name, value in (
        ("blocksparse_vert_stride", vert_stride),
        ("blocksparse_local_blocks", local_blocks),
        ("blocksparse_head_sliding_step", head_sliding_step),
    ):
        if value not in (0, None):
            refuse(name, "0, because block-sparse attention is not served", value)
