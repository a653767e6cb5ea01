"""Stands in for CoreX's vLLM 0.6.3: V1 is the vendor's and short of arguments, V2 is a hole."""

import functools

import ixformer.functions as ixf

COMPLAINTS = []  # where the port logs an error


def hint_on_error(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            COMPLAINTS.append(f"Error in calling custom op {function.__name__}: {error}")
            raise NotImplementedError("Not implemented or built") from error

    return wrapper


@hint_on_error
def paged_attention_v1(
    output,
    query,
    key_cache,
    value_cache,
    head_mapping,
    scale,
    block_tables,
    context_lens,
    block_size,
    max_context_len,
    alibi_slopes=None,
    kv_cache_dtype=None,
):
    ixf.vllm_single_query_cached_kv_attention(
        output,
        query,
        key_cache,
        value_cache,
        head_mapping,
        scale,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        alibi_slopes,
    )


@hint_on_error
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
    alibi_slopes,
    kv_cache_dtype,
    k_scale,
    v_scale,
    tp_rank=0,
    blocksparse_local_blocks=0,
    blocksparse_vert_stride=0,
    blocksparse_block_size=64,
    blocksparse_head_sliding_step=0,
):
    raise NotImplementedError()


@hint_on_error
def reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    ixf.vllm_cache_ops_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
