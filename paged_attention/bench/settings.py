"""What a run measures: its settings, and the calls of the stages and the kernel."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paged_attention.bench.peers.data import Call
from paged_attention.bench.peers.ours import KernelCall
from paged_attention.cost.predict import Shape
from paged_attention.inputs import Inputs, random_inputs
from paged_attention.measure.yardstick import kv_bytes
from paged_attention.stages import STAGES

LADDER = (*STAGES, "paged_attention")  # the kernel is its last step


@dataclass(frozen=True)
class Settings:
    """The sizes of a decode step in the "vllm" layout, and what takes it.

    partition_size: tokens, of the stages; the kernel chooses its own, as for any user
    stages:         names of LADDER
    peers:          names of peers.PEERS
    """

    device: str = "cpu"
    num_heads: int = 24
    num_kv_heads: int = 4
    head_size: int = 256
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    partition_size: int = 512
    stages: tuple[str, ...] = LADDER
    peers: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @property
    def sizes(self) -> dict[str, Any]:
        """The four numbers of tokens, heads and lanes, as keyword arguments."""
        names = ("num_heads", "num_kv_heads", "head_size", "block_size")
        return {name: getattr(self, name) for name in names}

    def inputs(self, seq_lens: Sequence[int], device: str | None = None) -> Inputs:
        """Sequences of so many tokens: blocks in random order, unused slots NaN."""
        return random_inputs(
            seq_lens, dtype=self.dtype, device=device or self.device, **self.sizes
        )

    def shape(self, name: str, seq_lens: Sequence[int], layout: str = "vllm") -> Shape:
        """The same step for `cost.predict`, of a stage or of the kernel."""
        partition_size = self.partition_size if name in STAGES else None
        return Shape(
            tuple(seq_lens), partition_size=partition_size, dtype=self.dtype, layout=layout,
            **self.sizes,
        )  # fmt: skip

    def call(self, name: str, inputs: Inputs) -> Call:
        """The call of a stage or of the kernel, which takes no arguments."""
        if name == "paged_attention":
            return KernelCall(inputs, layout="vllm", scale=self.scale)
        return lambda: STAGES[name](*inputs, self.scale, partition_size=self.partition_size)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V together that so many tokens hold."""
        return kv_bytes(num_tokens, self.num_kv_heads, self.head_size, self.dtype)


NUM_SEQS, SHORTEST, LONGEST = 16, 16, 16_384
RAGGED_PEERS = ("paged_attention_HND", "gather_sdpa", "vllm_cpu_op")  # they serve a batch


def ragged_lengths() -> tuple[int, ...]:
    """The lengths of a ragged batch: 16 draws between 16 and 16,384 tokens, log-uniform.

    Each factor of two is as likely as any other. With this seed the draw spans nearly all of it.

    Example:
        >>> sorted(ragged_lengths())[::5]
        [18, 97, 1052, 15897]
    """
    draw = random.Random(3).random
    return tuple(round(SHORTEST * (LONGEST / SHORTEST) ** draw()) for _ in range(NUM_SEQS))


def ragged(settings: Settings) -> Settings:
    """The same sizes, for the peers that serve a ragged batch."""
    return replace(settings, stages=(), peers=RAGGED_PEERS)
