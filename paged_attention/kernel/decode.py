"""The kernel: decode attention over a paged KV cache, checked, planned and run.

check_call -> DecodePlan (waves, segments, buffers) -> execute: phase1 in waves, phase2
"""

from typing import Any

from torch import Tensor

from .call import Inputs, check_call, check_values, lengths_on_host
from .checks import check_flag, optional_count, refuse
from .compiled.choice import chosen_backend
from .options import Options
from .plan import DecodePlan
from .transforms import uncompiled
from .workspace import Workspace


@uncompiled
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    layout: str | None = None,
    scale: float | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    max_seq_len: int | None = None,
    partition_size: int | None = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the new tokens of each sequence over its paged KV cache.

    Args:    query: (num_seqs, num_heads, head_size) or (num_seqs, q_len, num_heads, head_size),
                   fp32/fp16/bf16. Row i of q_len stands at position seq_len - q_len + i
             key_cache, value_cache: fp32/fp16/bf16, converted by value where query's dtype
                   differs, or fp8 (see kv_cache_dtype), in the layout
                     "vllm"  (num_blocks, num_kv_heads, head_size/x, block_size, x) and
                             (num_blocks, num_kv_heads, head_size, block_size), x = 16 / itemsize
                     "HND"   (num_blocks, num_kv_heads, block_size, head_size), both
                     "NHD"   (num_blocks, block_size, num_kv_heads, head_size), both
             block_tables: (num_seqs, max_blocks), int32/int64. Entries past a sequence's end, or
                   before its window, are never read
             seq_lens: (num_seqs,), int32/int64, tokens in the cache, the new ones included. On
                   the caches' device or on the CPU
             layout: None means "vllm" for a 5-D key cache
             scale: multiplies the logits. None is head_size ** -0.5
             kv_cache_dtype: "auto", or what uint8 caches hold: "fp8" (= "fp8_e4m3") or
                   "fp8_e5m2". torch's float8 caches describe themselves
             k_scale, v_scale: multiply the cached keys and values. A float, or a float tensor of
                   one element or (num_kv_heads,)
             alibi_slopes: (num_heads,), floating. slope * (key position - query position) is
                   added to a logit, after softcap
             window: how many keys a row sees, the newest included
             softcap: a logit becomes softcap * tanh(logit / softcap)
             sinks: (num_heads,), floating. A sink is a logit that takes weight and has no value.
                   It is neither scaled nor capped, and -inf means none
             causal: whether a row sees no key after its own position. With False all rows see all
                   keys, and window and alibi_slopes must be None
             max_seq_len: tokens. When given, no sequence may be longer
             partition_size: tokens per partition, rounded up to whole blocks. None: 1,024, or
                   what a wave holds if that is less
             backend: None or "eager", which is PyTorch's own operations, or "numba", which is
                   compiled for a CPU and needs the extra `cpu`
             workspace: a Workspace for the intermediates. None: the calling thread's own for the
                   device and its current stream, which is kept between calls
             out: where to write, with query's shape and its dtype or float32. It may be strided,
                   and must not share memory with an input
             validate: False skips the checks of what tensors hold: block_tables, alibi_slopes,
                   sinks, k_scale and v_scale
    Returns: out: query's shape and dtype (or `out`), accumulated in float32
             lse: out.shape[:-1], float32, natural log, the sink included. Only with
                   return_lse=True. A row that sees no key has out 0 and lse -inf (or the sink)
    Raises:  TypeError, ValueError: the argument, its value, and what it should be. There is no
             backward, so a tensor that requires a gradient is refused while autograd is on
             ImportError: the backend's compiler isn't installed
    Numbers: float32 throughout, autocast or not (torch.set_float32_matmul_precision still has its
             say). What exceeds float32's range overflows: a partition's sum of weighted values, or
             a logit, which becomes NaN if it is too large and counts as unseen if it is too small
    Cost:    K and V of the live blocks are read once from the cache, copied a wave at a time, and
             the copy is read once. On a CPU a wave is small enough for the processor's caches
             (2,048 tokens of 4 KV heads of 256 lanes). On an accelerator seq_lens is read back to
             the host, which is one synchronisation. Unless validate=False, block_tables and each
             tensor among the options are read back, too. With validate=False and max_seq_len
             nothing is read back, and the cost follows max_seq_len. A step with many layers is
             planned once, with `plan_decode`
    Source:  vLLM attention_kernels.cuh, paged_attention_v2_kernel; paged_attention_v2.cu, which
             cuts a sequence into partitions of 512 tokens
    Example: one sequence of 5 tokens in two blocks of 4. A query of 0 weighs all tokens equally.
        >>> import torch
        >>> pool = torch.arange(8.0).view(2, 1, 4, 1).expand(2, 1, 4, 16)  # (blocks, heads, 4, 16)
        >>> tables, lens = torch.tensor([[1, 0]]), torch.tensor([5])
        >>> out = paged_attention(torch.zeros(1, 2, 16), pool, pool, tables, lens, layout="HND")
        >>> out[0, :, 0]  # the mean of 4, 5, 6, 7 in block 1 and of 0 in block 0
        tensor([4.4000, 4.4000])
    """
    inputs = Inputs(query, key_cache, value_cache, block_tables, seq_lens)
    options = Options(scale, k_scale, v_scale, alibi_slopes, window, softcap, sinks, causal)
    call = check_call(inputs, layout, kv_cache_dtype, options)
    max_seq_len = optional_count("max_seq_len", max_seq_len, least=0)
    check_flag("return_lse", return_lse)
    check_flag("validate", validate)
    where = call.shape, call.layout, query.device
    how: dict[str, Any] = {"partition_size": partition_size}
    how["backend"] = chosen_backend(backend, query.device)
    if max_seq_len is not None and not validate and not seq_lens.is_cpu:
        # The true lengths stay on the device.
        capacity = min(max_seq_len, call.covered)
        plan = DecodePlan.capacity(*where, [capacity] * len(query), **how)
    else:
        lengths = lengths_on_host(call, max_seq_len)
        if validate:
            check_values(call, lengths)
        elif not call.geometry.num_blocks and any(lengths):
            refuse("key_cache", "large enough for the batch's tokens", tuple(key_cache.shape))
        plan = DecodePlan.exact(*where, lengths, **how)
    return plan.run_checked(call, out, workspace, return_lse)
