"""The kernel: decode attention over a paged KV cache, checked, planned, and run.

checks -> plan: partitions, waves, buffers -> Phase 1 in waves -> Phase 2
"""

from paged_attention.kernel.checks import (
    check_backend,
    check_block_ids,
    check_flag,
    check_lengths,
    check_tensors,
    checked_count,
)
from paged_attention.kernel.options import check_values, make_options
from paged_attention.kernel.partition import first_needed
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.schedule import Heads


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
    """Attention of the new tokens of each sequence over its paged KV cache.

    Args:    query: (num_seqs, num_heads, head_size) or (num_seqs, q_len, num_heads, head_size),
                   fp32/fp16/bf16; row i of q_len stands at position seq_len - q_len + i
             key_cache, value_cache: fp32/fp16/bf16, converted by value where query's dtype
                   differs, or fp8 (see kv_cache_dtype); in the layout
                     "vllm"  (num_blocks, num_kv_heads, head_size/x, block_size, x) and
                             (num_blocks, num_kv_heads, head_size, block_size), x = 16 / itemsize
                     "HND"   (num_blocks, num_kv_heads, block_size, head_size), both
                     "NHD"   (num_blocks, block_size, num_kv_heads, head_size), both
             block_tables: (num_seqs, max_blocks), int32/int64; entries past a sequence's end are
                   never read, nor are those before its window
             seq_lens: (num_seqs,), int32/int64, tokens in the cache, the new ones included; on
                   the caches' device or on the CPU
             layout: None means "vllm" for a 5-D key cache
             scale: multiplies the logits; None is head_size ** -0.5
             kv_cache_dtype: "auto", or what uint8 caches hold: "fp8" (= "fp8_e4m3") or
                   "fp8_e5m2". torch's float8 caches describe themselves
             k_scale, v_scale: multiply the cached keys and values; a float, or a float tensor of
                   one element or (num_kv_heads,)
             softcap: a logit becomes softcap * tanh(logit / softcap)
             alibi_slopes: (num_heads,), floating; a logit gets
                   slope * (key position - query position) added, softcap done
             window: how many keys a row sees, the newest included
             sinks: (num_heads,), floating: a logit that takes weight and has no value, neither
                   scaled nor capped; -inf is none
             causal: whether a row sees no key after its own position; False: all rows see all
                   keys, without window and alibi_slopes
             max_seq_len: tokens; when given, no sequence may be longer
             partition_size: tokens per partition, rounded up to whole blocks; None: 1,024, or
                   what a wave holds if that is less
             backend: None or "eager"
             workspace: a Workspace for the intermediates; None: the calling thread's own for the
                   device and its current stream, kept between calls
             out: where to write, query's shape, its dtype or float32; may be strided, must not
                   share memory with an input
             validate: False skips the checks of values that tensors hold: of block_tables,
                   alibi_slopes, sinks, k_scale and v_scale
    Returns: out: query's shape and dtype (or `out`), accumulated in float32
             lse: out.shape[:-1], float32, natural log, the sink included; only with
                   return_lse=True. A row that sees no key: out 0, lse -inf (or the sink)
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Numbers: float32 throughout, autocast or not (torch.set_float32_matmul_precision still has its
             say); what exceeds float32's range overflows: a partition's sum of weighted values, or
             a logit (NaN above, as if unseen below)
    Cost:    reads K and V of the live blocks once from the cache and twice from a copy of a wave,
             which on a CPU is small enough for its caches (2,048 tokens of 4 KV heads of 256
             lanes). On an accelerator seq_lens is read back to the host, one
             synchronisation, and unless validate=False so are block_tables and each tensor among
             the options; with validate=False and max_seq_len nothing is, and the cost follows
             max_seq_len. A step with many layers is planned once with `plan_decode`
    Source:  vLLM attention_kernels.cuh, paged_attention_v2 (partitions of 512 tokens)
    """
    layout, geometry = check_tensors(
        query, key_cache, value_cache, block_tables, seq_lens, layout, kv_cache_dtype
    )
    options = make_options(
        query, geometry, scale, softcap, alibi_slopes, causal, window, sinks, k_scale, v_scale
    )
    max_seq_len = checked_count("max_seq_len", max_seq_len, least=0)
    check_flag("return_lse", return_lse)
    check_flag("validate", validate)
    check_backend(backend)
    q_len, block_size = (query.shape[1] if query.dim() == 4 else 1), geometry.block_size
    static = not validate and max_seq_len is not None and not seq_lens.is_cpu
    covered = block_tables.shape[1] * block_size
    if static:  # the true lengths stay on the device
        lengths = [min(max_seq_len, covered)] * len(query)
    else:
        lengths = seq_lens.tolist()
        check_lengths(lengths, block_tables, geometry, max_seq_len)
    if validate:
        check_values(options)
        firsts = [first_needed(n, q_len, options.window, block_size) for n in lengths]
        check_block_ids(lengths, firsts, block_tables, geometry)
    elif not geometry.num_blocks and not static and any(lengths):
        raise ValueError(f"key_cache must hold the batch's tokens, got {tuple(key_cache.shape)}")
    heads = Heads(
        query.shape[-2], *geometry[2:], block_size, key_cache.dtype, q_len, options.window
    )
    plan = DecodePlan(heads, layout, query.device, lengths, static, partition_size)
    inputs = query, key_cache, value_cache, block_tables, seq_lens
    return plan.run_checked(inputs, options, kv_cache_dtype, workspace, out, return_lse)
