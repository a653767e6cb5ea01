"""The V2 of CoreX's ixformer, which its port of vLLM has and never calls.

PAGED_ATTENTION_VLLM=vendor asks for it. It wants both caches as (blocks, heads, block_size,
head_size), and vLLM's lie otherwise. So a step's own blocks are gathered into that order, and the
block table is numbered anew. To permute the whole pool, most of which isn't read, would copy it
in every layer of every step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from paged_attention.kernel.partition import ceil_div
from paged_attention.vllm.attention import paged_attention_v2
from paged_attention.vllm.choice import PARTITION_SIZE
from paged_attention.vllm.head_mapping import head_mapping
from paged_attention.vllm.port import SPARSE

MODULE, KERNEL = "ixformer.functions", "vllm_single_query_cached_kv_attention_v2"
# What the kernel takes, by vLLM's names. For num_kv_heads it takes a head_mapping.
OPERANDS = (
    "out partition_size exp_sum max_logits tmp_out query key_cache value_cache num_kv_heads scale "
    "block_tables seq_lens block_size max_seq_len"
).split()


def vendors_v2() -> Callable[..., None]:
    """A paged_attention_v2 that is the vendor's where its kernel takes the call, and else ours.

    The kernel has no arguments for ALiBi, fp8 and block-sparse attention, and ours refuses the
    last. Nothing else is checked, as in a native operation.

    Raises:  ValueError: the kernel isn't there
    Cost:    K and V of max_seq_len tokens are gathered for each sequence, so they are there twice.
             Nothing is read back
    Source:  dylanyunlon/project_6, d2b4df54, for the kernel's arguments
    """
    try:
        kernel = getattr(import_module(MODULE), KERNEL)
    except (ImportError, AttributeError) as error:
        needed = f"{MODULE}.{KERNEL}"
        raise ValueError(f"PAGED_ATTENTION_VLLM=vendor needs {needed}: {error}") from error
    signature = inspect.signature(paged_attention_v2)

    @functools.wraps(paged_attention_v2)
    def v2(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, query = bound.arguments, bound.arguments["query"]
        same_dtype = given["key_cache"].dtype == query.dtype == given["out"].dtype
        sparse = any(given[name] not in (0, None) for name in SPARSE)
        if given["alibi_slopes"] is not None or not same_dtype or sparse:
            return paged_attention_v2(*args, **kwargs)
        given |= gathered(given) | {"partition_size": PARTITION_SIZE}
        if not isinstance(given["num_kv_heads"], Tensor):
            sizes = query.shape[1], given["num_kv_heads"]
            given["num_kv_heads"] = head_mapping(*sizes, query.device)
        kernel(*(given[name] for name in OPERANDS))

    return v2


def gathered(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The caches and the block table of a step, with its own blocks alone, as the kernel reads.

    A table's entries past a sequence's end may be anything, so block 0 is gathered for them.

    Returns: key_cache, value_cache: (num_seqs * max_blocks, num_kv_heads, block_size, head_size)
             block_tables: (num_seqs, max_blocks), int32
    """
    value_cache, table = given["value_cache"], given["block_tables"]
    block_size = value_cache.shape[3]
    table = table[:, : ceil_div(given["max_seq_len"], block_size)]
    starts = torch.arange(table.shape[1], device=table.device) * block_size
    past_end = starts >= given["seq_lens"].to(table.device).unsqueeze(1)
    ids = table.masked_fill(past_end, 0).flatten()
    renumbered = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    keys = given["key_cache"].permute(0, 1, 3, 2, 4)  # (num_blocks, kv_heads, block_size, D/x, x)
    return {
        "key_cache": keys.index_select(0, ids).flatten(3),
        "value_cache": value_cache.transpose(2, 3).index_select(0, ids),
        "block_tables": renumbered.view_as(table),
    }
