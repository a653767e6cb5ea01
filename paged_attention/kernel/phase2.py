"""Phase 2: the states of each sequence's partitions become one state, segment by segment."""

from .gather import select
from .merge import LOWEST, merge_rows
from .step import Step
from .workspace import Buffer


def phase2(step: Step) -> tuple[Buffer, Buffer]:
    """Merge the states of each row.

    The merge is a segmented reduction. A row's states are adjacent, and rows of equally many
    states come together, so that nothing is padded.

    Returns: the buffers that hold acc_s, (num_seqs, num_rows, state_columns), and m, (num_seqs,
             num_rows), in the batch's order
    """
    schedule, _, buffers = step
    shape = schedule.shape
    acc_s, m, weights = buffers.acc_s(), buffers.m(), buffers.merge_weights()
    merged_acc_s, merged_m = buffers.merged_acc_s(), buffers.merged_m()
    for row, num_rows, state, num_states in schedule.segments:
        out_acc_s, out_m = merged_acc_s[row:], merged_m[row : row + num_rows]
        states = slice(state, state + num_rows * num_states)
        if num_states == 0:  # empty sequences
            out_acc_s.zero_()
            out_m.fill_(LOWEST)
        elif num_states == 1:  # single tile: the state is there already
            out_acc_s[:num_rows].copy_(acc_s[states].unsqueeze(1))
            out_m.copy_(m[states])
        else:
            merge_rows(
                acc_s[states].view(num_rows, num_states, shape.state_columns),
                m[states].view(num_rows, num_states),
                weights[states].view(num_rows, num_states),
                out_acc_s,
                out_m,
            )
    if schedule.inverse is None:
        return buffers.merged_acc_s, buffers.merged_m
    sorted_acc_s, sorted_m = buffers.sorted_acc_s(), buffers.sorted_m()
    select(buffers.merged_acc_s(*sorted_acc_s.shape), schedule.inverse, sorted_acc_s)
    select(buffers.merged_m(*sorted_m.shape), schedule.inverse, sorted_m)
    return buffers.sorted_acc_s, buffers.sorted_m
