"""Partitions and waves: the plan of a reduction, in pure integers.

A *partition* is `partition_size` consecutive tokens of one sequence. It is what Phase 1 works on.
A batch is one flat list of *work items*, which are pairs of sequence and partition. A *wave* is
the items that are gathered and reduced together. They have equal widths, so that nothing is
padded. Their number is limited by a budget of tokens, so that a wave's intermediates stay small
however long the sequences are.

How a sequence is cut depends on its own length alone.
"""

from typing import NamedTuple, TypeVar


class WorkItem(NamedTuple):
    """One partition of one sequence: `width` tokens from token `start` on.

    The width is a multiple of the block size. So a sequence's last item may end a few slots after
    the sequence does.
    """

    seq: int
    start: int
    width: int


class SharedItem(NamedTuple):
    """One partition of a prefix, which the query rows of all of `seqs` meet at once.

    `seq` is one of them. The blocks are read from its row of the block table.
    """

    seq: int
    start: int
    width: int
    seqs: tuple[int, ...]


Item = TypeVar("Item", WorkItem, SharedItem)


def ceil_div(a: int, b: int) -> int:
    """How many b it takes to cover a."""
    return -(-a // b)


def whole_blocks(tokens: int, block_size: int) -> int:
    """tokens, rounded up to a multiple of block_size."""
    return ceil_div(tokens, block_size) * block_size


def first_needed(seq_len: int, q_len: int, window: int | None, block_size: int) -> int:
    """The first token of the first block in which one of the last q_len queries sees a token."""
    if window is None:
        return 0
    return max(0, seq_len - (window + q_len - 1)) // block_size * block_size


def work_items(seq_lens: list[int], partition_size: int, block_size: int) -> list[WorkItem]:
    """The partitions of every sequence, in order. An empty sequence has none.

    Args:    seq_lens: tokens
             partition_size: tokens, a multiple of block_size
    Returns: items that cover [0, seq_len) of each sequence exactly once. Each is partition_size
             wide, but a sequence's last item has only the blocks that are left
    """
    return [
        item
        for seq, seq_len in enumerate(seq_lens)
        for item in partitions(seq, 0, seq_len, partition_size, block_size)
    ]


def partitions(
    seq: int, first: int, end: int, partition_size: int, block_size: int
) -> list[WorkItem]:
    """The partitions of the tokens [first, end) of one sequence."""
    return [
        WorkItem(seq, start, min(partition_size, whole_blocks(end - start, block_size)))
        for start in range(first, end, partition_size)
    ]


def waves(items: list[Item], wave_tokens: int) -> list[list[Item]]:
    """Cut a flat list into waves, which are lists of items of equal width.

    Items of equal width keep their order.

    Args:    wave_tokens: the most tokens that a wave may hold. It holds one item in any case
    """
    by_width: dict[int, list[Item]] = {}
    for item in items:
        by_width.setdefault(item.width, []).append(item)
    return [
        alike[first:end]
        for width, alike in by_width.items()
        for first, end in even_shares(
            len(alike), ceil_div(len(alike), max(1, wave_tokens // width))
        )
    ]


def even_shares(num_tiles: int, max_workers: int) -> list[tuple[int, int]]:
    """Divide tiles among workers so that shares differ by one tile at most.

    The workers here are waves, which run one after the other. On a GPU they would be thread
    blocks, and max_workers what the grid is limited to.

    Returns: a list of (first tile, tile past the last), the bigger shares first
    Source:  NVIDIA CCCL, cub/grid/grid_even_share.cuh. GridEvenShare::DispatchInit gives each
             worker num_tiles / workers tiles. The tiles left over make as many shares larger by
             one. BlockInit gives these to the first workers, where workers take consecutive
             tiles (GRID_MAPPING_RAKE)
    """
    workers = min(num_tiles, max_workers)
    if workers == 0:
        return []
    share, big_shares = divmod(num_tiles, workers)
    first = [worker * share + min(worker, big_shares) for worker in range(workers + 1)]
    return list(zip(first, first[1:]))
