"""Stands in for CoreX's vLLM 0.6.3: V1 is the vendor's and short of arguments, V2 is a hole."""

import ixformer.functions as ixf


def paged_attention_v1(*given):
    ixf.vllm_single_query_cached_kv_attention(*given[:11])


def paged_attention_v2(*given):
    raise NotImplementedError("paged_attention_v2")


def reshape_and_cache(*given):
    ixf.vllm_cache_ops_reshape_and_cache(*given[:5])
