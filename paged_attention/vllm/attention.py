"""vLLM's paged_attention_v1 and paged_attention_v2, by position and by name, on our kernel."""

import functools

import torch

from paged_attention.kernel.checks import (
    check_block_ids,
    check_lengths,
    check_tensors,
    required_count,
)
from paged_attention.kernel.options import check_values, make_options
from paged_attention.kernel.partition import whole_blocks
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.schedule import Heads
from paged_attention.kernel.workspace import default_workspace, is_traced
from paged_attention.vllm.choice import PARTITION_SIZE, partition_size
from paged_attention.vllm.scales import cache_options
from paged_attention.vllm.states import check_scratch, write_states


def paged_attention_v1(
    out,
    query,
    key_cache,
    value_cache,
    num_kv_heads,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
    alibi_slopes=None,
    kv_cache_dtype=None,
    k_scale=None,
    v_scale=None,
    tp_rank=0,
    blocksparse_local_blocks=0,
    blocksparse_vert_stride=0,
    blocksparse_block_size=64,
    blocksparse_head_sliding_step=0,
):
    """Attention of one new token per sequence, into `out`.

    Args:    out: (num_seqs, num_heads, head_size), query's dtype or float32
             query: (num_seqs, num_heads, head_size), fp32/fp16/bf16
             key_cache: (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
             value_cache: (num_blocks, num_kv_heads, head_size, block_size)
             num_kv_heads, block_size: the caches'
             block_tables: (num_seqs, max_blocks), seq_lens: (num_seqs,), int32/int64
             max_seq_len: tokens, at least the longest sequence
             alibi_slopes: None or (num_heads,), times (key position - query position)
             kv_cache_dtype: None or "auto": the caches' own, the scales are ignored, as by vLLM;
                   "fp8", "fp8_e4m3" or "fp8_e5m2": caches of uint8
             k_scale, v_scale: floats or tensors, what cached keys and values are multiplied by
             tp_rank, blocksparse_*: of block-sparse attention, which must be off
    Raises:  TypeError, ValueError: the argument, its value, and what it should be. On a CPU
                   lengths and block ids are checked, too; elsewhere that would cost a
                   synchronisation: a sequence beyond max_seq_len or its table becomes NaN
    Cost:    as `paged_attention`; on an accelerator it follows num_seqs * max_seq_len, and
             nothing is read back
    Source:  vLLM vllm/_custom_ops.py, paged_attention_v1, 0.5.3 to 0.12; kv_cache_dtype and the
             scales may be missing, as in CoreX's vLLM 0.6.3
    """
    _refuse_blocksparse(
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_head_sliding_step
    )
    tensors = query, key_cache, value_cache, block_tables, seq_lens
    numbers = num_kv_heads, block_size, max_seq_len
    options = scale, alibi_slopes, *cache_options(kv_cache_dtype, k_scale, v_scale)
    plan, run_arguments = _planned(out, tensors, numbers, options, PARTITION_SIZE)
    plan.run_checked(*run_arguments)


def paged_attention_v2(
    out,
    exp_sum,
    max_logits,
    tmp_out,
    query,
    key_cache,
    value_cache,
    num_kv_heads,
    scale,
    block_tables,
    seq_lens,
    block_size,
    max_seq_len,
    alibi_slopes=None,
    kv_cache_dtype=None,
    k_scale=None,
    v_scale=None,
    tp_rank=0,
    blocksparse_local_blocks=0,
    blocksparse_vert_stride=0,
    blocksparse_block_size=64,
    blocksparse_head_sliding_step=0,
):
    """As `paged_attention_v1`, in partitions whose states are left in the scratch tensors.

    `out` is merged from float32 states, so it is the same whatever dtype tmp_out has.

    Args:    exp_sum: (num_seqs, num_heads, num_partitions), float32: of each partition the sum of
                   exp(logit - its max_logits)
             max_logits: like exp_sum: its largest logit, scaled, ALiBi included
             tmp_out: (num_seqs, num_heads, num_partitions, head_size), out's dtype or float32: its
                   attention, normalised
             num_partitions: max_seq_len in partitions of 512 tokens, or of
                   PAGED_ATTENTION_PARTITION_SIZE, rounded up to whole blocks; there may be more.
                   Partitions past a sequence's end are neither read nor written
    Source:  vLLM vllm/_custom_ops.py, paged_attention_v2; attention_kernels.cuh
    """
    _refuse_blocksparse(
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_head_sliding_step
    )
    tensors = query, key_cache, value_cache, block_tables, seq_lens
    numbers = num_kv_heads, block_size, max_seq_len
    options = scale, alibi_slopes, *cache_options(kv_cache_dtype, k_scale, v_scale)
    plan, run_arguments = _planned(out, tensors, numbers, options, partition_size())
    scratch = exp_sum, max_logits, tmp_out
    check_scratch(*scratch, out, max_seq_len, plan.partition_size)
    plan.run_checked(*run_arguments)
    _, options, _, workspace, *_ = run_arguments
    write_states(plan, workspace, seq_lens, options.v_scale, *scratch)


def _planned(out, tensors, numbers, options, partition_size):
    """Check one step's arguments, but for its scratch, and plan it.

    Returns: the plan, and the arguments of its run_checked
    """
    query, key_cache, value_cache, block_tables, seq_lens = tensors
    num_kv_heads, block_size, max_seq_len = numbers
    scale, alibi_slopes, kv_cache_dtype, k_scale, v_scale = options
    _, geometry = check_tensors(*tensors, "vllm", kv_cache_dtype)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a tensor, got {out!r}")
    if query.dim() != 3:
        raise ValueError(
            f"query must be (num_seqs, num_heads, head_size), got {tuple(query.shape)}"
        )
    for name, given in (("num_kv_heads", num_kv_heads), ("block_size", block_size)):
        if required_count(name, given) != getattr(geometry, name):
            raise ValueError(f"{name} must be the caches' {getattr(geometry, name)}, got {given}")
    max_seq_len = required_count("max_seq_len", max_seq_len, least=0)
    options = make_options(
        query, geometry, scale, None, alibi_slopes, True, None, None, k_scale, v_scale
    )
    heads = Heads(query.shape[1], *geometry[2:], block_size, key_cache.dtype, 1, None)
    if seq_lens.is_cpu and block_tables.is_cpu:
        lengths = seq_lens.tolist()
        check_values(options)
        check_lengths(lengths, block_tables, geometry, max_seq_len)
        check_block_ids(lengths, [0] * len(lengths), block_tables, geometry)
        plan = DecodePlan(heads, "vllm", query.device, lengths, False, partition_size)
    else:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "vLLM's operations on this package can't be captured in a CUDA graph: "
                "enforce_eager must be True"
            )
        # Rounded up, so that the plan serves all layers, and as many steps as a partition has.
        capacity = whole_blocks(max_seq_len, whole_blocks(partition_size, block_size))
        capacity = min(capacity, block_tables.shape[1] * block_size)
        make = _capacity_plan.__wrapped__ if is_traced(query) else _capacity_plan
        plan = make(heads, query.device, len(query), capacity, partition_size)
    workspace = default_workspace(query.device)
    return plan, (tensors, options, kv_cache_dtype, workspace, out, False)


@functools.lru_cache(maxsize=16)
def _capacity_plan(heads, device, num_seqs, capacity, partition_size):
    return DecodePlan(heads, "vllm", device, [capacity] * num_seqs, True, partition_size)


def _refuse_blocksparse(local_blocks, vert_stride, head_sliding_step):
    """A stride of 1 lets every block be seen, and 0 or None is off; the size says nothing then."""
    if vert_stride == 1:
        return
    for name, value in (
        ("blocksparse_vert_stride", vert_stride),
        ("blocksparse_local_blocks", local_blocks),
        ("blocksparse_head_sliding_step", head_sliding_step),
    ):
        if value not in (0, None):
            raise ValueError(
                f"{name} must be 0, block-sparse attention is not served, got {value}"
            )
