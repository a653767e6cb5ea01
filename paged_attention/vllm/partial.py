"""The states that Phase 1 leaves for Phase 2, which vLLM's V2 hands to its caller."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.workspace import Workspace


class PartialStates(NamedTuple):
    """The states of sequences of equally many partitions.

    acc is unnormalised and not yet times v_scale. No sink is among the states.
    """

    seqs: list[int]
    acc: Tensor  # (seqs, num_heads, q_len, partitions, head_size)
    s: Tensor  # (seqs, num_heads, q_len, partitions)
    m: Tensor  # like s


def partial_states(plan: DecodePlan, workspace: Workspace) -> list[PartialStates]:
    """The states of a plan's partitions, as its last run left them in a workspace.

    They are views, and no other plan may have used the workspace since.
    """
    schedule, shape, result = plan.schedule, plan.schedule.shape, []
    buffers = workspace.bind(plan.buffers, schedule.arange)
    all_acc_s, all_m = buffers.acc_s(), buffers.m()
    for row, num_rows, state, num_states in schedule.segments:
        first, num_seqs = row // shape.num_rows, num_rows // shape.num_rows
        size = num_seqs, shape.num_heads, shape.q_len, num_states
        of_segment = slice(state, state + num_rows * num_states)
        acc_s = all_acc_s[of_segment].view(*size, shape.state_columns)
        result.append(
            PartialStates(
                seqs=schedule.order[first : first + num_seqs],
                acc=acc_s[..., : shape.head_size],
                s=acc_s[..., shape.head_size],
                m=all_m[of_segment].view(size),
            )
        )
    return result
