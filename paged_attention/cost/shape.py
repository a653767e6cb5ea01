"""The shape of a decode step, which decides its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from paged_attention.inputs import Inputs, random_inputs
from paged_attention.kernel.checks import FLOATS, optional_count, refuse, required_count
from paged_attention.kernel.layouts import Geometry, cache_shapes


@dataclass(frozen=True)
class Shape:
    """One decode step. The defaults are the series' workload.

    seq_lens:       tokens of each sequence, 0 allowed. Any iterable of int, kept as a tuple
    num_heads, num_kv_heads, head_size, block_size: as in the cache's layout
    partition_size: tokens, rounded up to whole blocks. None: the default of what is called, which
                    is 512 tokens in a stage, and 1,024 or what a wave holds in the kernel
    dtype:          of the query and of both caches: float32, float16 or bfloat16
    layout:         of the caches, "vllm", "HND" or "NHD". The stages take "vllm" only

    Raises: TypeError, ValueError: the argument, its value, and what it should be
    """

    seq_lens: tuple[int, ...]
    num_heads: int = 24
    num_kv_heads: int = 4
    head_size: int = 256
    block_size: int = 16
    partition_size: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "vllm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "seq_lens", tuple(self.seq_lens))
        for seq, length in enumerate(self.seq_lens):
            required_count(f"seq_lens[{seq}]", length, least=0)
        for name in ("num_heads", "num_kv_heads", "head_size", "block_size"):
            required_count(name, getattr(self, name))
        optional_count("partition_size", self.partition_size)
        if self.num_heads % self.num_kv_heads:
            refuse("num_heads", f"a multiple of num_kv_heads, {self.num_kv_heads}", self.num_heads)
        if self.dtype not in FLOATS:
            refuse("dtype", "float32, float16 or bfloat16", repr(self.dtype))
        geometry = Geometry(1, self.block_size, self.num_kv_heads, self.head_size)
        cache_shapes(geometry, self.layout, self.dtype)  # which refuses what the layout can't have

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all tokens, which is what the floor reads."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * self.dtype.itemsize

    def inputs(self) -> Inputs:
        """Tensors of such a step. Tables and lengths are on the CPU, the others have no data."""
        sizes = asdict(self)
        del sizes["partition_size"]
        return random_inputs(**sizes, device="meta")
