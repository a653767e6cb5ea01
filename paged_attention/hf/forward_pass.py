"""What all layers of one forward pass share."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attention.cache import PagedKVCache
from paged_attention.kernel.layouts import Geometry
from paged_attention.kernel.plan import DecodePlan, plan_decode

# Query tokens of a row that attend together. More are no faster on a CPU, and take more memory.
MOST_QUERIES = 64


class ForwardPass:
    """The slots, the block table, the lengths and the plans of one forward pass.

    Each row of a pass belongs to a sequence. Its columns are new tokens and, on the left, padding.
    The tokens count from `commit` on. Until then nobody else reads them.

    Args:    is_new: (rows, q_len), bool, on the CPU. True where a column is a token to be stored
             first: the position of each row's first token, for the next pass
    Raises:  OutOfBlocks: the pool can't hold them. Nothing is changed
    """

    def __init__(
        self, pool: PagedKVCache, seq_ids: list, is_new: Tensor, first: list[int]
    ) -> None:
        self._pool, self._seq_ids, self.counts = pool, seq_ids, is_new.sum(dim=1).tolist()
        self.first, self.written = first, set()  # written: the numbers of layers that are done
        slots = pool.reserve_all(seq_ids, self.counts)
        self.slots = torch.full(is_new.shape, -1, dtype=torch.int64, device=slots.device)
        self.slots[is_new.to(slots.device)] = slots  # (rows, q_len)
        self.tables = pool.block_tables(seq_ids)
        more = torch.tensor(self.counts, dtype=torch.int32, device=slots.device)
        self.lens = pool.seq_lens(seq_ids) + more
        self._shared = pool.shared_prefixes(seq_ids)
        self._pieces = defaultdict(list)

    def commit(self) -> None:
        """From now on its tokens count."""
        self._pool.advance_all(self._seq_ids, self.counts, [max(0, n) for n in self.first])

    def roll_back(self) -> None:
        """Give back the blocks that were reserved, of sequences that are still there."""
        for seq_id in self._seq_ids:
            with suppress(KeyError):
                self._pool.truncate(seq_id, int(self._pool.seq_lens([seq_id])))

    def pieces(
        self, num_heads: int, q_len: int, window: int | None, geometry: Geometry
    ) -> list[Piece]:
        """The last q_len columns in pieces, planned once for all layers that are alike."""
        pieces = self._pieces[num_heads, q_len, window, geometry]
        if pieces:
            return pieces
        _, block_size, num_kv_heads, head_size = geometry
        for start in range(0, q_len, MOST_QUERIES):
            end = min(start + MOST_QUERIES, q_len)
            # Padding is on the left. So the columns before a row's first token have negative
            # positions, which see no key.
            lens = (self.lens - (q_len - end)).clamp_min_(0)
            lengths = lens.tolist()
            plan = plan_decode(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=block_size,
                layout=self._pool.layout,
                dtype=self._pool.key_cache().dtype,
                device=lens.device,
                seq_lens=lengths,
                q_len=end - start,
                window=window,
                prefix_lens=self._shared.prefix_lens,
                group_of=self._groups(lengths),
            )
            pieces.append(Piece(slice(start, end), lens, plan))
        return pieces

    def _groups(self, lengths: list[int]) -> list[int]:
        """The group of each row. A row has none where its padding reaches into its prefix."""
        prefix_lens, group_of = self._shared.prefix_lens.tolist(), self._shared.group_of.tolist()
        return [g if g >= 0 and prefix_lens[g] <= n else -1 for g, n in zip(group_of, lengths)]


class Piece(NamedTuple):
    """Some neighbouring columns of a forward pass, which attend together."""

    columns: slice
    lens: Tensor  # (rows,), the tokens of each row up to the last of these columns
    plan: DecodePlan
