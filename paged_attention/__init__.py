"""PagedAttention V2 decode in PyTorch: the kernel, its cache, and its float64 judge.

The lessons are in `paged_attention.stages`, the measuring in `paged_attention.measure`.
"""

from .cache import OutOfBlocks, PagedKVCache
from .decode import paged_attention
from .phase2 import merge_states
from .plan import DecodePlan, plan_decode
from .reference import reference_attention
from .workspace import Workspace

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
