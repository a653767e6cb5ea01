"""Partitions and waves: the plan of a reduction, in pure integers.

A *partition* is `partition_size` consecutive tokens of one sequence, the unit of Phase 1. A batch
is one flat list of *work items*, (sequence, partition). A *wave* is the items that are gathered
and reduced together: items of equal width, so that nothing is padded, and as many as a budget of
tokens allows, so that however long the sequences are, a wave's intermediates stay small.

How a sequence is cut depends on its own length alone.
"""

from typing import NamedTuple


class WorkItem(NamedTuple):
    """One partition of one sequence: `width` tokens, whole blocks of them, from token `start` on.

    All of them are the sequence's own, but for what follows its end in its last block.
    """

    seq: int
    start: int
    width: int


def ceil_div(a, b):
    """How many b it takes to cover a."""
    return -(-a // b)


def whole_blocks(tokens, block_size):
    """tokens, rounded up to a multiple of block_size."""
    return ceil_div(tokens, block_size) * block_size


def first_needed(seq_len, q_len, window, block_size):
    """The first token of the first block that any of the last q_len queries sees a token of."""
    if window is None:
        return 0
    return max(0, seq_len - (window + q_len - 1)) // block_size * block_size


def work_items(seq_lens, partition_size, block_size):
    """The flat list: the partitions of every sequence, in order; none of an empty one.

    Args:    seq_lens: list of int, tokens
             partition_size: tokens, a multiple of block_size
    Returns: a list of WorkItem that covers [0, seq_len) of each sequence exactly once. All items
             are partition_size wide but a sequence's last, which has as many blocks as are left
    """
    return [
        WorkItem(seq, start, min(partition_size, whole_blocks(seq_len - start, block_size)))
        for seq, seq_len in enumerate(seq_lens)
        for start in range(0, seq_len, partition_size)
    ]


def waves(items, wave_tokens):
    """Cut a flat list into waves: lists of items of equal width, the order otherwise kept.

    Args:    items: a list of WorkItem
             wave_tokens: the most tokens a wave may hold; one item it holds in any case
    """
    by_width = {}
    for item in items:
        by_width.setdefault(item.width, []).append(item)
    return [
        alike[first:end]
        for width, alike in by_width.items()
        for first, end in even_shares(
            len(alike), ceil_div(len(alike), max(1, wave_tokens // width))
        )
    ]


def even_shares(num_tiles, max_workers):
    """Divide tiles among workers so that shares differ by one tile at most.

    The workers here are waves, one after the other; on a GPU they would be thread blocks, and
    max_workers what `grid_size` allows.

    Returns: a list of (first tile, tile past the last), the bigger shares first
    Source:  NVIDIA CCCL, cub/grid/grid_even_share.cuh: GridEvenShare::DispatchInit gives every
             worker num_tiles / workers tiles and counts num_tiles % workers big shares, which
             BlockInit, where workers take consecutive tiles (GRID_MAPPING_RAKE), gives to the
             first ones
    """
    workers = min(num_tiles, max_workers)
    if workers == 0:
        return []
    share, big_shares = divmod(num_tiles, workers)
    first = [worker * share + min(worker, big_shares) for worker in range(workers + 1)]
    return list(zip(first, first[1:]))


def grid_size(num_tiles, sm_count, sm_occupancy, subscription_factor=5):
    """How many thread blocks CUB launches to reduce num_tiles tiles: no more than a device can
    hold at once, times a factor that lets early finishers take over from late ones.

    Args:    sm_occupancy: thread blocks of the kernel that one multiprocessor holds
    Source:  NVIDIA CCCL, cub/device/dispatch/dispatch_reduce.cuh, InvokePasses:
             max_blocks = sm_occupancy * sm_count * subscription_factor, of which
             GridEvenShare::DispatchInit takes min(num_tiles, max_blocks). The factor is 5,
             CUB_SUBSCRIPTION_FACTOR in cub/util_arch.cuh (CCCL 002af086; older versions had 3 for
             compute capability 2)
    """
    return min(num_tiles, sm_occupancy * sm_count * subscription_factor)
