"""Phase 2: the states of each sequence's partitions -> one state, segment by segment."""

from paged_attention.kernel.gather import select
from paged_attention.kernel.merge import LOWEST, merge_rows
from paged_attention.kernel.states import all_states


def phase2(schedule, views):
    """One merge for each row of each sequence.

    Returns: acc_s: (num_seqs, num_rows, aligned(head_size + 1)) and m: (num_seqs, num_rows),
                 in order
    """
    num_seq_rows = schedule.heads.num_rows
    acc_s, m = all_states(schedule, views)
    columns = acc_s.shape[1]
    weights = views("weights", schedule.num_states)
    rows = schedule.num_seqs * num_seq_rows
    merged_acc_s = views("merged_acc_s", rows + 1, 1, columns)  # one more than there are:
    merged_m = views("merged_m", rows)  # batched_gemm wants room for two
    for row, num_rows, state, num_states in schedule.segments:
        out_acc_s, out_m = merged_acc_s[row:], merged_m[row : row + num_rows]
        if num_states == 0:  # empty sequences
            out_acc_s.zero_()
            out_m.fill_(LOWEST)
            continue
        states = slice(state, state + num_rows * num_states)
        merge_rows(
            acc_s[states].view(num_rows, num_states, columns),
            m[states].view(num_rows, num_states),
            weights[states].view(num_rows, num_states),
            out_acc_s,
            out_m,
        )
    acc_s = merged_acc_s[:-1].view(schedule.num_seqs, num_seq_rows, columns)
    m = merged_m.view(schedule.num_seqs, num_seq_rows)
    if schedule.inverse is None:
        return acc_s, m
    return (
        select(acc_s, schedule.inverse, views("sorted_acc_s", *acc_s.shape)),
        select(m, schedule.inverse, views("sorted_m", *m.shape)),
    )
