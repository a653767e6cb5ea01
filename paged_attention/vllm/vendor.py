"""The V2 of CoreX's ixformer, which its port of vLLM has and never calls.

PAGED_ATTENTION_VLLM=vendor asks for it. It wants both caches as (blocks, heads, block_size,
head_size), and vLLM's lie otherwise. So a step's own blocks are gathered into that order, and the
block table is numbered anew. To permute the whole pool, most of which isn't read, would copy it
in every layer of every step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attention.kernel.partition import ceil_div
from paged_attention.vllm.attention import paged_attention_v2
from paged_attention.vllm.choice import PARTITION_SIZE
from paged_attention.vllm.head_mapping import head_mapping
from paged_attention.vllm.port import SPARSE

MODULE, KERNEL = "ixformer.functions", "vllm_single_query_cached_kv_attention_v2"


def vendors_v2() -> Callable[..., None]:
    """A paged_attention_v2 that is the vendor's where its kernel takes the call, and else ours.

    The kernel has no arguments for ALiBi, fp8 and block-sparse attention, and ours refuses the
    last. Nothing else is checked, as in a native operation.

    Raises:  ValueError: the kernel isn't there
    Cost:    for each sequence K and V of max_seq_len tokens are gathered, so they are there twice.
             Nothing is read back
    Source:  dylanyunlon/project_6, d2b4df54, for the kernel's arguments
    """
    try:
        kernel = getattr(import_module(MODULE), KERNEL)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"PAGED_ATTENTION_VLLM=vendor needs {MODULE}.{KERNEL}: {error}"
        ) from error
    signature = inspect.signature(paged_attention_v2)

    @functools.wraps(paged_attention_v2)
    def v2(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, mapping = given["query"], given["num_kv_heads"]
        same_dtype = given["key_cache"].dtype == query.dtype == given["out"].dtype
        sparse = any(given[name] not in (0, None) for name in SPARSE)
        if given["alibi_slopes"] is not None or not same_dtype or sparse:
            return paged_attention_v2(*args, **kwargs)
        if not isinstance(mapping, Tensor):
            mapping = head_mapping(query.shape[1], mapping, query.device)
        names = "key_cache value_cache block_tables seq_lens max_seq_len".split()
        live = gathered(*(given[name] for name in names))
        kernel(
            given["out"],
            PARTITION_SIZE,
            given["exp_sum"],
            given["max_logits"],
            given["tmp_out"],
            query,
            live.keys,
            live.values,
            mapping,
            given["scale"],
            live.block_tables,
            given["seq_lens"],
            given["block_size"],
            given["max_seq_len"],
        )

    return v2


class Gathered(NamedTuple):
    """A step's blocks in a pool of their own."""

    keys: Tensor  # (num_seqs * max_blocks, num_kv_heads, block_size, head_size)
    values: Tensor
    block_tables: Tensor  # (num_seqs, max_blocks), int32


def gathered(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
) -> Gathered:
    """The blocks of sequences in vLLM's caches, in the order that the vendor's V2 reads.

    A table's entries past a sequence's end may be anything, so block 0 is gathered for them.
    """
    block_size = value_cache.shape[3]
    columns = min(ceil_div(max_seq_len, block_size), block_tables.shape[1])
    starts = torch.arange(columns, device=block_tables.device) * block_size
    past_end = starts >= seq_lens.to(block_tables.device).unsqueeze(1)
    ids = block_tables[:, :columns].masked_fill(past_end, 0).flatten()
    keys = key_cache.permute(0, 1, 3, 2, 4).index_select(0, ids).flatten(3)
    values = value_cache.transpose(2, 3).index_select(0, ids)
    table = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return Gathered(keys, values, table.view(-1, columns))
