"""The kernel: a decode step checked, planned and run. Nothing here imports another room.

Read it in the order of the data:

    decode -> plan -> schedule -> execute -> phase1 -> phase2
"""

from paged_attention.kernel.decode import paged_attention
from paged_attention.kernel.layouts import pack, unpack
from paged_attention.kernel.merge import merge_states
from paged_attention.kernel.partition import ceil_div, even_shares, grid_size, waves, work_items
from paged_attention.kernel.phase1 import wave_states
from paged_attention.kernel.plan import PARTITION_SIZE, DecodePlan, plan_decode
from paged_attention.kernel.states import partial_states
from paged_attention.kernel.workspace import Workspace

__all__ = [
    "DecodePlan",
    "PARTITION_SIZE",
    "Workspace",
    "ceil_div",
    "even_shares",
    "grid_size",
    "merge_states",
    "pack",
    "paged_attention",
    "partial_states",
    "plan_decode",
    "unpack",
    "wave_states",
    "waves",
    "work_items",
]
