"""What every peer gets: the ladder's batch. And how a peer says that it can't run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from paged_attention.inputs import Inputs, pack, unpack
from paged_attention.kernel.partition import ceil_div

Call = Callable[[], torch.Tensor]  # returns (num_seqs, num_heads, head_size)


class Unavailable(Exception):
    """A peer can't run here. The message says why, in a few words."""


class CachedSequence(NamedTuple):
    """One sequence of the batch."""

    query: torch.Tensor  # (1, num_heads, head_size)
    block_ids: torch.Tensor  # (blocks,), int32
    num_tokens: int


class Batch:
    """The ladder's batch. Every peer works on the same values, in blocks of the same order.

    Args:    inputs: in the "vllm" layout, as `inputs.random_inputs` makes them
             scale: multiplies the logits
    """

    def __init__(self, inputs: Inputs, scale: float) -> None:
        self.inputs, self.scale = inputs, scale
        # K and V, each (num_blocks, num_kv_heads, block_size, head_size); unused slots hold NaN
        self.hnd = pack(*unpack(inputs.key_cache, inputs.value_cache, "vllm"), "HND")
        self.num_blocks, _, self.block_size, _ = self.hnd[0].shape
        self.sequences = [
            CachedSequence(query[None], table[: ceil_div(length, self.block_size)], length)
            for query, table, length in zip(
                inputs.query, inputs.block_tables, inputs.seq_lens.tolist()
            )
        ]

    @property
    def only_sequence(self) -> CachedSequence:
        """The batch's one sequence. Raises Unavailable if there are more."""
        if len(self.sequences) != 1:
            raise Unavailable(f"takes one sequence, not {len(self.sequences)}")
        return self.sequences[0]

    def gather(self, sequence: CachedSequence) -> list[torch.Tensor]:
        """A sequence's K and V, each (1, num_kv_heads, num_tokens, head_size).

        `index_select` and one reordering copy are the fastest of the ways that were tried. The
        others were advanced indexing and `index_select` along the second dimension.
        """
        return [
            cache.index_select(0, sequence.block_ids)  # (blocks, kv_heads, block_size, head_size)
            .transpose(0, 1)
            .flatten(1, 2)[None, :, : sequence.num_tokens]
            for cache in self.hnd
        ]
