"""vLLM's operations called as vLLM calls them, with poisoned scratch and a poisoned `out`."""

from __future__ import annotations

import pytest
import torch
from pools import NAN, paged, random

from paged_attention.vllm.attention import paged_attention_v1, paged_attention_v2
from paged_attention.vllm.states import Scratch

LENS = [1030, 0, 17, 600]
OPERATIONS = {"v1": paged_attention_v1, "v2": paged_attention_v2}
BAD_SCALES = [0.0, -0.0, NAN, torch.inf, -torch.inf, 1e39, 1e-50, torch.tensor(0.0)]
BAD_SCALES += [torch.tensor(NAN), torch.tensor([1.0, torch.inf]), torch.tensor(1e39).double()]
each_version = pytest.mark.parametrize("version", OPERATIONS)


def step(lens=LENS, num_heads=6, num_kv_heads=2, head_size=32, block_size=16, **noise):
    """(Dense, arguments) of random tensors; noise: sharp, dtype."""
    dense = random(lens, num_heads, num_kv_heads, head_size, **noise)
    return dense, arguments(dense, paged(dense, block_size, "vllm"))


def arguments(dense, pool, scale=None, **changed):
    """V1's arguments after `out`, by vLLM's names and in its order, as 0.5.3 to 0.12 pass them."""
    return {
        "query": dense.query,
        "key_cache": pool.key_cache,
        "value_cache": pool.value_cache,
        "num_kv_heads": pool.value_cache.shape[1],
        "scale": dense.query.shape[2] ** -0.5 if scale is None else scale,
        "block_tables": pool.block_tables,
        "seq_lens": pool.seq_lens,
        "block_size": pool.value_cache.shape[3],
        "max_seq_len": max(pool.seq_lens.tolist(), default=0),
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
        "tp_rank": 0,
        "blocksparse_local_blocks": 0,
        "blocksparse_vert_stride": 0,
        "blocksparse_block_size": 64,
        "blocksparse_head_sliding_step": 0,
    } | changed


def scratch_for(query, partitions, dtype=None):
    shape = (*query.shape[:2], partitions)
    tmp_out = torch.full((*shape, query.shape[2]), NAN, dtype=dtype or query.dtype)
    return Scratch(torch.full(shape, NAN), torch.full(shape, NAN), tmp_out)


def run(version, given, scratch=None, out=None, count=None):
    """out, from the first `count` arguments by position."""
    query, seq_lens = given["query"], given["seq_lens"]
    out = torch.full_like(query, NAN) if out is None else out
    if scratch is None:
        scratch = scratch_for(query, -(-max(seq_lens.tolist(), default=0) // 512), out.dtype)
    before = scratch if version == "v2" else ()
    OPERATIONS[version](out, *before, *[*given.values()][:count])
    return out


def run_v2(given, partitions, dtype=None):
    """(out, scratch) of V2."""
    scratch = scratch_for(given["query"], partitions, dtype)
    return run("v2", given, scratch), scratch
