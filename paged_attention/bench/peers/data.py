"""What every peer gets: the ladder's batch. And how a peer says that it can't run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from paged_attention.inputs import Inputs, pack, unpack
from paged_attention.kernel.partition import ceil_div

Call = Callable[[], torch.Tensor]  # returns the query's shape


class Unavailable(Exception):
    """A peer can't run here. The message says why, in a few words."""


class CachedSequence(NamedTuple):
    """One sequence of the batch."""

    query: torch.Tensor  # (q_len, num_heads, head_size)
    block_ids: torch.Tensor  # (blocks,), int32
    num_tokens: int


class Batch:
    """One decode step. Every peer works on the same values, in blocks of the same order.

    Args:    inputs: as `inputs.random_inputs` makes them
             scale: multiplies the logits
             layout: of the caches, "vllm" or "HND"
    """

    def __init__(self, inputs: Inputs, scale: float, layout: str = "vllm") -> None:
        self.inputs, self.scale = inputs, scale
        # K and V, each (num_blocks, num_kv_heads, block_size, head_size); unused slots hold NaN
        self.hnd = inputs.key_cache, inputs.value_cache
        if layout != "HND":
            self.hnd = pack(*unpack(*self.hnd, layout), "HND")
        self.num_blocks, _, self.block_size, _ = self.hnd[0].shape
        self.q_len = inputs.query.shape[1] if inputs.query.dim() == 4 else 1
        # (sequences, q_len, query heads, lanes)
        queries = inputs.query.view(-1, self.q_len, *inputs.query.shape[-2:])
        self.sequences = [
            CachedSequence(query, table[: ceil_div(length, self.block_size)], length)
            for query, table, length in zip(queries, inputs.block_tables, inputs.seq_lens.tolist())
        ]

    @property
    def only_sequence(self) -> CachedSequence:
        """The batch's one sequence. Raises Unavailable if there are more."""
        if len(self.sequences) != 1:
            raise Unavailable(f"takes one sequence, not {len(self.sequences)}")
        return self.sequences[0]

    def gather(self, sequence: CachedSequence) -> list[torch.Tensor]:
        """A sequence's K and V, each (1, num_kv_heads, num_tokens, head_size), in query's dtype.

        `index_select` and one reordering copy are the fastest of the ways that were tried. The
        others were advanced indexing and `index_select` along the second dimension.
        """
        return [
            cache.index_select(0, sequence.block_ids)  # (blocks, kv_heads, block_size, head_size)
            .to(sequence.query.dtype)  # of an fp8 cache
            .transpose(0, 1)
            .flatten(1, 2)[None, :, : sequence.num_tokens]
            for cache in self.hnd
        ]
