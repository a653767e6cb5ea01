"""What a run of the ladder measures: its settings, and the call of each rung."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from paged_attention.bench.peers.ours_and_sdpa import KernelCall
from paged_attention.cost.predict import Shape
from paged_attention.inputs import Inputs, random_inputs
from paged_attention.measure.yardstick import kv_bytes
from paged_attention.stages import STAGES

RUNGS = (*STAGES, "paged_attention")


@dataclass(frozen=True)
class Settings:
    """The sizes of a decode step in the "vllm" layout, and who takes it.

    partition_size: tokens, of the stages; the kernel chooses its own, as for any user
    stages: names of RUNGS;  peers: names of peers.PEERS
    """

    device: str = "cpu"
    num_heads: int = 24
    num_kv_heads: int = 4
    head_size: int = 256
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    partition_size: int = 512
    stages: tuple[str, ...] = RUNGS
    peers: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def inputs(self, seq_lens: Sequence[int], device=None) -> Inputs:
        """Sequences of so many tokens, blocks in random order, unused slots NaN."""
        return random_inputs(
            seq_lens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            dtype=self.dtype,
            device=device or self.device,
        )

    def shape(self, name: str, seq_lens: Sequence[int], layout: str = "vllm") -> Shape:
        """The same for `cost.predict`, of a stage or the kernel."""
        return Shape(
            seq_lens,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            partition_size=self.partition_size if name in STAGES else None,
            dtype=self.dtype,
            layout=layout,
        )

    def kv_bytes(self, num_tokens: int) -> int:
        return kv_bytes(num_tokens, self.num_kv_heads, self.head_size, self.dtype)


def rung(name: str, inputs: Inputs, settings: Settings) -> Callable[[], torch.Tensor]:
    """A call of the named stage, or of the kernel, that takes no arguments."""
    scale = settings.scale
    if name == "paged_attention":
        return KernelCall(inputs, layout="vllm", scale=scale)
    return lambda: STAGES[name](*inputs, scale, partition_size=settings.partition_size)


NUM_SEQS, SHORTEST, LONGEST = 16, 16, 16_384
RAGGED_PEERS = ("paged_attention_HND", "gather_sdpa", "vllm_cpu_op")


def ragged_lengths() -> tuple[int, ...]:
    """16 lengths between 16 and 16,384 tokens, log-uniform: each factor of two as likely. The
    seed is one whose draw spans nearly all of it, 18 to 15,897."""
    draw = random.Random(3).random
    return tuple(round(SHORTEST * (LONGEST / SHORTEST) ** draw()) for _ in range(NUM_SEQS))


def ragged(settings: Settings) -> Settings:
    """The same sizes, for those that serve a batch."""
    return replace(settings, stages=(), peers=RAGGED_PEERS)
