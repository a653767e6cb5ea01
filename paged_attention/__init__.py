"""PagedAttention V2 decode in PyTorch: the kernel, its cache, and its float64 judge.

The lessons are in `paged_attention.stages`, the measuring in `paged_attention.measure`.
"""

from paged_attention.cache import OutOfBlocks, PagedKVCache
from paged_attention.kernel.decode import paged_attention
from paged_attention.kernel.merge import merge_states
from paged_attention.kernel.plan import DecodePlan, plan_decode
from paged_attention.kernel.workspace import Workspace
from paged_attention.reference import reference_attention

__version__ = "0.1.0"

__all__ = [
    "DecodePlan",
    "OutOfBlocks",
    "PagedKVCache",
    "Workspace",
    "merge_states",
    "paged_attention",
    "plan_decode",
    "reference_attention",
]
