"""A ragged batch, as a server has it: the kernel beside its peers where lengths differ."""

from __future__ import annotations

import random
from dataclasses import replace

from .settings import Settings

NUM_SEQS, SHORTEST, LONGEST = 16, 16, 16_384
PEERS = ("paged_attention_HND", "gather_sdpa", "vllm_cpu_op")


def ragged_lengths() -> tuple[int, ...]:
    """16 lengths between 16 and 16,384 tokens, log-uniform: each factor of two as likely. The
    seed is one whose draw spans nearly all of it, 18 to 15,897."""
    draw = random.Random(3).random
    return tuple(round(SHORTEST * (LONGEST / SHORTEST) ** draw()) for _ in range(NUM_SEQS))


def ragged(settings: Settings) -> Settings:
    """The same sizes, for those that serve a batch."""
    return replace(settings, stages=(), peers=PEERS)
