"""The kernel: decode attention over a paged KV cache, checked, cut, reduced and merged.

    checks -> for each sequence: waves of partitions -> Phase 1 -> Phase 2

A sequence is reduced on its own, in waves whose shapes depend on its length alone: its bits do not
depend on its neighbours, and intermediates are as large as one wave, however long the sequence.
"""

import torch

from .checks import (
    FLOATS,
    check_block_ids,
    check_flag,
    check_lengths,
    check_out,
    check_tensors,
    checked_count,
)
from .layouts import gather
from .options import make_options
from .partition import ceil_div, waves, whole_blocks
from .phase1 import partition_states
from .phase2 import State, finish, float32_math, merge
from .workspace import NOT_YET

PARTITION_SIZE = 512  # tokens; vLLM's _PARTITION_SIZE
WAVE_TOKENS = 2048  # tokens gathered at once: small enough for a CPU to keep them in its cache


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    *,
    layout=None,
    scale=None,
    kv_cache_dtype="auto",
    k_scale=1.0,
    v_scale=1.0,
    alibi_slopes=None,
    window=None,
    softcap=None,
    sinks=None,
    causal=True,
    max_seq_len=None,
    partition_size=None,
    backend=None,
    workspace=None,
    out=None,
    return_lse=False,
    validate=True,
):
    """Attention of one new token per sequence over its paged KV cache.

    Args:    query: (num_seqs, num_heads, head_size) or (num_seqs, 1, num_heads, head_size),
                   fp32/fp16/bf16
             key_cache, value_cache: fp32/fp16/bf16, converted by value where query's dtype
                   differs; in the layout
                     "vllm"  (num_blocks, num_kv_heads, head_size/x, block_size, x) and
                             (num_blocks, num_kv_heads, head_size, block_size), x = 16 / itemsize
                     "HND"   (num_blocks, num_kv_heads, block_size, head_size), both
                     "NHD"   (num_blocks, block_size, num_kv_heads, head_size), both
             block_tables: (num_seqs, max_blocks), int32/int64; entries past a sequence's end are
                   never read
             seq_lens: (num_seqs,), int32/int64, tokens in the cache, the new one included; on
                   the caches' device or on the CPU. An empty sequence gives out 0, lse -inf
             layout: None means "vllm" for a 5-D key cache
             scale: multiplies the logits; None is head_size ** -0.5
             k_scale, v_scale: multiply the cached keys and values; a float, or a float tensor of
                   one element or (num_kv_heads,)
             max_seq_len: tokens; when given, no sequence may be longer
             partition_size: tokens per partition, rounded up to whole blocks; None is 512
             backend: None or "eager"
             out: where to write, query's shape, its dtype or float32; may be strided, must not
                   share memory with an input
             validate: False skips the check of block ids, which reads block_tables
             kv_cache_dtype, alibi_slopes, window, softcap, sinks, causal, workspace: not
                   implemented in this version, anything but the default raises
    Returns: out: query's shape and dtype (or `out`), accumulated in float32
             lse: out.shape[:-1], float32, natural log; only with return_lse=True
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
             NotImplementedError: an option of a later version, by name
    Numbers: float32 throughout, autocast or not (torch.set_float32_matmul_precision still has its
             say); a partition's sum of weighted values that exceeds float32's range overflows
    Cost:    reads K and V of the live blocks once from the cache and several times from copies of
             a wave (about 2,048 tokens). On an accelerator seq_lens is read back to the host, one
             synchronisation, and block_tables too unless validate=False
    Source:  vLLM attention_kernels.cuh, paged_attention_v2 (partitions of 512 tokens)
    """
    layout, geometry = check_tensors(
        query, key_cache, value_cache, block_tables, seq_lens, layout, kv_cache_dtype
    )
    options = make_options(
        query.shape[-2],
        geometry,
        query.device,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        causal=causal,
        window=window,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    max_seq_len = checked_count("max_seq_len", max_seq_len, least=0)
    partition_size = checked_count("partition_size", partition_size)
    check_flag("return_lse", return_lse)
    check_flag("validate", validate)
    if backend is not None and (not isinstance(backend, str) or backend != "eager"):
        raise ValueError(f'backend must be None or "eager", got {backend!r}')
    _refuse_what_is_to_come(query, key_cache, options, workspace)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    else:
        inputs = {
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": block_tables,
            "seq_lens": seq_lens,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        check_out(out, query, inputs)
    lengths = seq_lens.tolist()
    check_lengths(lengths, block_tables, geometry, max_seq_len)
    if validate:
        check_block_ids(lengths, block_tables, geometry)

    partition_size = whole_blocks(partition_size or PARTITION_SIZE, geometry.block_size)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for seq, seq_len in enumerate(lengths):
        if seq_len == 0:
            out[seq], lse[seq] = 0.0, -torch.inf
            continue
        q = query[seq].reshape(geometry.num_kv_heads, -1, geometry.head_size).contiguous()
        with float32_math(query.device):
            state = _sequence_state(
                q.float() * options.scale * options.k_scale,
                key_cache,
                value_cache,
                block_tables[seq],
                waves(seq_len, partition_size, WAVE_TOKENS),
                layout,
                geometry.block_size,
            )
        seq_out, seq_lse = finish(state)
        seq_out = seq_out.view(q.shape) * options.v_scale
        out[seq] = seq_out.view(out[seq].shape)
        lse[seq] = seq_lse.view(lse[seq].shape)
    return (out, lse) if return_lse else out


def _refuse_what_is_to_come(query, key_cache, options, workspace):
    """NotImplementedError for what the contract has and this version hasn't: never ignored."""
    if query.dim() == 4 and query.shape[1] != 1:
        raise NotImplementedError(f"query with q_len={query.shape[1]} {NOT_YET}")
    if key_cache.dtype not in FLOATS:
        raise NotImplementedError(f"fp8: key_cache of {key_cache.dtype} {NOT_YET}")
    for name in ("alibi_slopes", "window", "softcap", "sinks"):
        if getattr(options, name) is not None:
            raise NotImplementedError(f"{name}={getattr(options, name)!r} {NOT_YET}")
    if not options.causal:
        raise NotImplementedError(f"causal=False {NOT_YET}")
    if workspace is not None:
        raise NotImplementedError(f"workspace={workspace!r} {NOT_YET}")


def _sequence_state(query, key_cache, value_cache, block_table, waves, layout, block_size):
    """Phase 1 wave by wave, then one merge; a sequence of one partition has nothing to merge.

    Args:    query: (num_kv_heads, num_queries_per_kv, head_size), float32, scaled
             block_table: (max_blocks,), one sequence's
    Returns: State of the whole sequence, (num_heads, ...)
    """
    states = []
    for wave in waves:
        blocks = block_table[wave.start // block_size : ceil_div(wave.end, block_size)]
        key, value = gather(key_cache, value_cache, blocks, layout)
        num_tokens = wave.end - wave.start  # what follows in the last block is not the sequence's
        states.append(
            partition_states(
                query, key[:, :num_tokens], value[:, :num_tokens], wave.num_partitions
            )
        )
    if len(states) == 1 and waves[0].num_partitions == 1:  # SingleTile
        return State(*(part[0] for part in states[0]))
    return merge(State(*(torch.cat(parts) for parts in zip(*states))))


def plan_decode(
    *,
    num_heads,
    num_kv_heads,
    head_size,
    block_size,
    layout,
    dtype=torch.float32,
    device="cpu",
    seq_lens=None,
    num_seqs=None,
    max_seq_len=None,
    q_len=1,
    window=None,
    partition_size=None,
    backend=None,
):
    """A plan for many calls with the same lengths. Not implemented in this version: it raises."""
    raise NotImplementedError(f"plan_decode {NOT_YET}")


class DecodePlan:
    """What `plan_decode` returns. Not implemented in this version: the constructor raises."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"DecodePlan {NOT_YET}")
