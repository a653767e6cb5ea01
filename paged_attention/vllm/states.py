"""Partial states as vLLM keeps them: what V2 leaves in its scratch tensors, and their merge.

Ours is (m, s, acc), unnormalised; vLLM's max_logits is m, its exp_sums s, its tmp_out acc / s.
"""

import torch

from paged_attention.kernel.merge import merge_states
from paged_attention.kernel.partition import ceil_div
from paged_attention.vllm.partial import partial_states


def check_scratch(exp_sum, max_logits, tmp_out, out, max_seq_len, partition_size):
    """ValueError or TypeError, unless the scratch tensors can take the states of such a step."""
    least = ceil_div(max_seq_len, partition_size)
    for name, tensor, lanes, dtypes in (
        ("exp_sum", exp_sum, (), {torch.float32}),
        ("max_logits", max_logits, (), {torch.float32}),
        ("tmp_out", tmp_out, out.shape[2:], {torch.float32, out.dtype}),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {tensor!r}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.device != out.device:
            raise ValueError(f"{name} must be on {out.device} like out, got {tensor.device}")
        shape, wanted = tensor.shape, (*out.shape[:2], least, *lanes)
        if len(shape) != len(wanted) or (*shape[:2], *shape[3:]) != (*wanted[:2], *wanted[3:]):
            raise ValueError(f"{name} must be {wanted}, got {tuple(shape)}")
        if shape[2] < least:
            raise ValueError(
                f"{name} must have room for the {least} partitions of {partition_size} that "
                f"max_seq_len {max_seq_len} takes, got {tuple(shape)}"
            )


@torch.no_grad()
def write_states(plan, workspace, seq_lens, v_scale, exp_sum, max_logits, tmp_out):
    """Copy the states of the plan's last run into vLLM's scratch tensors.

    Args:    v_scale: a float, or a tensor () or (num_kv_heads,): states are kept in units of the
                   cached values
    """
    seq_lens = seq_lens.to(exp_sum.device).view(-1, 1, 1)
    for seqs, *state in partial_states(plan, workspace):
        acc, s, m = (tensor.squeeze(2) for tensor in state)  # (seqs, num_heads, num_states, ...)
        seqs = (
            slice(None) if len(seqs) == plan.schedule.num_seqs else seqs
        )  # a list would be copied over
        attention = acc / s.unsqueeze(-1)
        if isinstance(v_scale, torch.Tensor) and v_scale.dim():
            by_kv_head = attention.unflatten(1, (len(v_scale), -1))
            attention = (by_kv_head * v_scale.view(-1, 1, 1, 1)).flatten(1, 2)
        else:
            attention = attention * v_scale
        # A capacity plan has partitions that lie past their sequence's end.
        starts = torch.arange(m.shape[2], device=m.device) * plan.partition_size
        live = starts < seq_lens[seqs]  # (seqs, 1, num_states)
        place = seqs, slice(None), slice(m.shape[2])
        for scratch, of_kind, seen in (
            (exp_sum, s, live),
            (max_logits, m, live),
            (tmp_out, attention, live.unsqueeze(-1)),
        ):
            scratch[place] = torch.where(seen, of_kind.to(scratch.dtype), scratch[place])


def merge_attn_states(
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None
):
    """Merge attention over a prefix with attention over the rest, into `output`.

    Args:    output, prefix_output, suffix_output: (num_tokens, num_heads, head_size), floating
             prefix_lse, suffix_lse: (num_heads, num_tokens), natural log; infinite, of either
                   sign, where there was nothing to attend to
             output_lse: None, or (num_heads, num_tokens), float32, where the merged one goes:
                   -inf where both are infinite, and output is 0 there
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Source:  vLLM vllm/_custom_ops.py, merge_attn_states; csrc/attention/merge_attn_states.cu
    """
    tensors = {
        "prefix_output": prefix_output,
        "prefix_lse": prefix_lse,
        "suffix_output": suffix_output,
        "suffix_lse": suffix_lse,
        "output_lse": output_lse,
        "output": output,
    }
    for name, tensor in tensors.items():
        if name == "output_lse" and tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {tensor!r}")
        shape = output.shape if name.endswith("output") else output.shape[1::-1]
        if output.dim() != 3 or tensor.shape != shape:
            wanted = "(num_tokens, num_heads, head_size)"
            wanted = wanted if name.endswith("output") else "(num_heads, num_tokens)"
            raise ValueError(
                f"{name} must be {wanted} for output {tuple(output.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    outs = torch.stack([prefix_output.float(), suffix_output.float()])
    lses = torch.stack([prefix_lse, suffix_lse]).transpose(1, 2)  # (2, num_tokens, num_heads)
    merged, lse = merge_states(outs, lses.masked_fill(lses == torch.inf, -torch.inf))
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(lse.t())
