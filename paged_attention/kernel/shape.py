"""The sizes of a decode step that do not depend on its sequence lengths."""

from typing import NamedTuple

import torch

from .gemm import padded


class StepShape(NamedTuple):
    """What a decode step looks like before its lengths are known.

    dtype: of the caches. uint8 stands for fp8 caches, too
    q_len: query tokens of each sequence
    window: how many keys a query sees, the newest included. None: all of them
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    q_len: int
    window: int | None

    @property
    def num_rows(self) -> int:
        """Rows of a sequence, which are its pairs of query head and query token."""
        return self.num_heads * self.q_len

    @property
    def group(self) -> int:
        """Rows that share a KV head. They are the rows of one matrix product."""
        return self.num_rows // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """Floats from one row of queries, K or V in the workspace to the next."""
        return padded(self.head_size)

    @property
    def state_columns(self) -> int:
        """Floats from one state [acc | s] in the workspace to the next."""
        return padded(self.head_size + 1)

    @property
    def needs_no_conversion(self) -> bool:
        """Whether rows of K and V can be used exactly as they lie in the caches."""
        return self.dtype == torch.float32 and self.lanes == self.head_size

    @property
    def tokens_near_window(self) -> int:
        """The most tokens that a sequence with a window needs. The tokens before the window in
        its first block are among them, because whole blocks are gathered."""
        assert self.window is not None
        return self.window + self.q_len - 1 + self.block_size - 1
