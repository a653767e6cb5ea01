"""The kernel: a decode step checked, planned and run. Nothing here imports another room.

Read it in the order of the data:

    decode.py     paged_attention: the arguments, a plan, a run
    call.py       the arguments, checked           (layouts.py, options.py, checks.py, aliasing.py;
                                                   transforms.py: torch.compile, autograd, tracers)
    plan.py       plan_decode: decides the sizes of partitions and waves, once for all layers
                                                   (planned.py: its arguments; device.py:
                                                   how large a wave may be)
    schedule.py   lengths -> waves and segments    (partition.py, shape.py; sharing.py: partitions
                                                   that sequences of one prefix share)
    step.py       every buffer, declared           (workspace.py: the memory they lie in)
    execute.py    a run: scale the query, Phase 1, Phase 2, merge the sink, write the result
    phase1.py     a wave at a time: gather K, logits, softmax, gather V, states
                                                   (gather.py, fp8.py; mask.py: what no query sees,
                                                   NaN in V included)
    phase2.py     the states of a sequence -> one  (merge.py: the algebra; gemm.py)

`shared_prefix.py` is decode.py's call for sequences that begin with the same tokens.
"""

from .decode import paged_attention
from .merge import merge_states
from .partition import ceil_div, even_shares, waves, work_items
from .phase1 import phase1
from .plan import PARTITION_SIZE, DecodePlan, plan_decode
from .shape import StepShape
from .shared_prefix import shared_prefix_attention
from .workspace import Workspace

__all__ = [
    "PARTITION_SIZE",
    "DecodePlan",
    "StepShape",
    "Workspace",
    "ceil_div",
    "even_shares",
    "merge_states",
    "paged_attention",
    "phase1",
    "plan_decode",
    "shared_prefix_attention",
    "waves",
    "work_items",
]
