"""The six stages of the series, in teaching order.

Each is one self-contained file with one function, and differs from the one before it by one idea;
they repeat each other on purpose, to be read side by side. Nothing of the kernel imports them.

    fn(query, key_cache, value_cache, block_tables, seq_lens, scale, partition_size=512) -> out

Args:    query: (num_seqs, num_heads, head_size), fp32/fp16/bf16
         key_cache: (num_blocks, num_kv_heads, head_size/x, block_size, x), the "vllm" layout
         value_cache: (num_blocks, num_kv_heads, head_size, block_size)
         block_tables: (num_seqs, max_blocks), int32 or int64, physical block ids
         seq_lens: (num_seqs,), int32 or int64, tokens
         scale: float, multiplies the logits
         partition_size: tokens per partition, rounded up to whole blocks
Returns: out: like query, accumulated in float32; an empty sequence's row is 0
Raises:  IndexError: from PyTorch, when a live table entry lies past the pool's end. The stages
         check nothing themselves, and a negative entry wraps around; `paged_attention` checks.
"""

from paged_attention.stages.batched_gather import batched_gather
from paged_attention.stages.fused_phase2 import fused_phase2
from paged_attention.stages.gqa_broadcast import gqa_broadcast
from paged_attention.stages.naive_loops import naive_loops
from paged_attention.stages.single_bmm import single_bmm
from paged_attention.stages.single_tile import single_tile

STAGES = {
    "naive_loops": naive_loops,
    "batched_gather": batched_gather,
    "single_bmm": single_bmm,
    "gqa_broadcast": gqa_broadcast,
    "single_tile": single_tile,
    "fused_phase2": fused_phase2,
}

__all__ = [
    "STAGES",
    "batched_gather",
    "fused_phase2",
    "gqa_broadcast",
    "naive_loops",
    "single_bmm",
    "single_tile",
]
