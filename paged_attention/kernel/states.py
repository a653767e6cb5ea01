"""What Phase 1 leaves for Phase 2, for those who want it: vLLM's V2 hands it to its caller."""

from paged_attention.kernel.merge import aligned


def partial_states(plan, workspace):
    """The states of a plan's partitions, as its last run left them in a workspace that no other
    plan has used since: views.

    Returns: a list of (seqs, acc, s, m) for sequences of equally many partitions: seqs a list of
             int, acc (seqs, num_heads, q_len, partitions, head_size), s and m without the last.
             acc is unnormalised and not yet times v_scale; no sink is among them
    """
    schedule, states = plan.schedule, []
    heads = schedule.heads
    acc_s, m = all_states(schedule, workspace.views(schedule.buffers, schedule.counting))
    for row, num_rows, state, num_states in schedule.segments:
        first, num_seqs = row // heads.num_rows, num_rows // heads.num_rows
        shape = num_seqs, heads.num_heads, heads.q_len, num_states
        of_segment = slice(state, state + num_rows * num_states)
        seqs = schedule.order[first : first + num_seqs]
        of_seqs = acc_s[of_segment].view(*shape, acc_s.shape[1])
        acc, s = of_seqs[..., : heads.head_size], of_seqs[..., heads.head_size]
        states.append((seqs, acc, s, m[of_segment].view(shape)))
    return states


def all_states(schedule, views):
    """acc_s: (all states, aligned(head_size + 1)) and m: (all states,)"""
    num_states, columns = schedule.num_states, aligned(schedule.heads.head_size + 1)
    return views("acc_s", num_states, columns), views("m", num_states)
