"""Stands in for a later state of CoreX's port, in which V2 calls PyTorch and never worked.

It divides by what it takes for the number of KV heads. Given a number it is wrong.
"""

import ixformer.functions as ixf

V2_CALLS = []


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
    first = output, query, key_cache, value_cache, head_mapping, scale, block_tables
    ixf.vllm_single_query_cached_kv_attention(
        *first, context_lens, block_size, max_context_len, alibi_slopes
    )


def paged_attention_v2(out, exp_sum, max_logits, tmp_out, query, *rest):
    V2_CALLS.append(len(rest) + 5)
    num_kv_heads = rest[2]
    try:
        group = query.shape[1] // max(map(int, num_kv_heads))
    except ZeroDivisionError as error:
        raise RuntimeError("ZeroDivisionError") from error
    except TypeError:
        group = query.shape[1] // num_kv_heads
    out.fill_(40.0 * group)


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *more):
    ixf.vllm_cache_ops_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
