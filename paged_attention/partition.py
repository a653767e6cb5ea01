"""Partitions and waves: the plan of a reduction, in pure integers.

A *partition* is `partition_size` consecutive tokens of one sequence, the unit of Phase 1. A *wave*
is the partitions that are gathered and reduced together. All partitions of a sequence are whole
but the last, so a wave holds partitions of one width and needs no padding, and how a sequence is
cut depends on its own length alone.
"""

from typing import NamedTuple


class Wave(NamedTuple):
    """`num_partitions` partitions of `width` tokens each, from token `start` on."""

    start: int
    num_partitions: int
    width: int

    @property
    def end(self):
        return self.start + self.num_partitions * self.width


def ceil_div(a, b):
    """How many b it takes to cover a."""
    return -(-a // b)


def whole_blocks(partition_size, block_size):
    """partition_size in tokens, rounded up to a multiple of block_size."""
    return ceil_div(partition_size, block_size) * block_size


def waves(seq_len, partition_size, wave_tokens):
    """The waves that cover tokens [0, seq_len) exactly, in order; none for an empty sequence.

    Args:    seq_len: tokens, >= 0
             partition_size: tokens, a multiple of the block size
             wave_tokens: tokens a wave may hold; a wave holds at least one partition
    Returns: a list of Wave; the ragged last partition is a wave of its own
    """
    per_wave = max(1, wave_tokens // partition_size)
    whole, rest = divmod(seq_len, partition_size)
    cut = [
        Wave(first * partition_size, min(per_wave, whole - first), partition_size)
        for first in range(0, whole, per_wave)
    ]
    if rest:
        cut.append(Wave(whole * partition_size, 1, rest))
    return cut
