"""Partial states as vLLM keeps them: what V2 leaves in its scratch tensors, and their merge."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paged_attention.kernel.checks import refuse, require_tensor
from paged_attention.kernel.merge import merge_states
from paged_attention.kernel.partition import ceil_div
from paged_attention.kernel.plan import DecodePlan
from paged_attention.kernel.workspace import Workspace
from paged_attention.vllm.partial import partial_states


class Scratch(NamedTuple):
    """V2's scratch: a state for each partition of each sequence and head.

    Our states are (m, s, acc), and acc is not normalised. Here max_logits is m, exp_sum is s, and
    tmp_out is acc / s.
    """

    exp_sum: Tensor  # (num_seqs, num_heads, num_partitions), float32
    max_logits: Tensor  # like exp_sum
    tmp_out: Tensor  # (num_seqs, num_heads, num_partitions, head_size), out's dtype or float32


def check_scratch(scratch: Scratch, out: Tensor, max_seq_len: int, partition_size: int) -> None:
    """Check that scratch tensors can take the states of such a step.

    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    """
    partitions = ceil_div(max_seq_len, partition_size)
    for name, tensor in scratch._asdict().items():
        lanes, dtypes = (), (torch.float32,)
        if name == "tmp_out":
            lanes, dtypes = out.shape[2:], (out.dtype, torch.float32)
        require_tensor(name, tensor, dtypes, device=out.device, like="out")
        shape, wanted = tuple(tensor.shape), (*out.shape[:2], partitions, *lanes)
        if len(shape) != len(wanted) or shape[:2] + shape[3:] != wanted[:2] + wanted[3:]:
            refuse(name, f"{wanted}", shape)
        if shape[2] < partitions:
            room = f"{partitions} partitions of {partition_size} that max_seq_len takes"
            refuse(name, f"{wanted}, with room for the {room}", shape)


@torch.no_grad()
def write_states(
    plan: DecodePlan,
    workspace: Workspace,
    seq_lens: Tensor,
    v_scale: float | Tensor,
    scratch: Scratch,
) -> None:
    """Copy the states of the plan's last run into vLLM's scratch tensors.

    Args:    workspace: the run's, which no other plan has used since
             v_scale: a float, or a tensor () or (num_kv_heads,). The states don't contain it yet
    """
    num_heads = plan.schedule.shape.num_heads
    if isinstance(v_scale, Tensor) and v_scale.dim():
        v_scale = v_scale.repeat_interleave(num_heads // len(v_scale)).view(-1, 1, 1)
    seq_lens = seq_lens.to(scratch.exp_sum.device).view(-1, 1, 1)
    for seqs, *states in partial_states(plan, workspace):
        acc, s, m = (tensor.squeeze(2) for tensor in states)  # (seqs, num_heads, num_states, ...)
        attention = acc / s.unsqueeze(-1) * v_scale
        if len(seqs) == plan.schedule.num_seqs:
            seqs = slice(None)  # because a list of them all would be copied to the device
        # A capacity plan has partitions that lie past their sequence's end. vLLM leaves those.
        starts = torch.arange(m.shape[2], device=m.device) * plan.partition_size
        live = starts < seq_lens[seqs]  # (num_seqs, 1, num_states)
        place = seqs, slice(None), slice(m.shape[2])
        for tensor, of_kind, seen in (
            (scratch.exp_sum, s, live),
            (scratch.max_logits, m, live),
            (scratch.tmp_out, attention, live.unsqueeze(-1)),
        ):
            tensor[place] = torch.where(seen, of_kind.to(tensor.dtype), tensor[place])


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merge attention over a prefix with attention over the rest, into `output`.

    Args:    output, prefix_output, suffix_output: (num_tokens, num_heads, head_size), floating
             prefix_lse, suffix_lse: (num_heads, num_tokens), natural log. Infinite, of either
                   sign, where there was nothing to attend to
             output_lse: None, or (num_heads, num_tokens), float32, for the merged one. Where both
                   are infinite it becomes -inf, and output 0
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Source:  vLLM vllm/_custom_ops.py, merge_attn_states; csrc/attention/merge_attn_states.cu
    Example: one token and one head. The prefix had 3 keys and the rest 1.
        >>> prefix, rest = torch.full((1, 1, 8), 1.0), torch.full((1, 1, 8), 5.0)
        >>> lses, output = torch.tensor([3.0, 1.0]).log().view(2, 1, 1), torch.empty(1, 1, 8)
        >>> merge_attn_states(output, prefix, lses[0], rest, lses[1])
        >>> output[0, 0, :2]  # 3/4 of 1 and 1/4 of 5
        tensor([2., 2.])
    """
    require_tensor("output", output)
    if output.dim() != 3:
        refuse("output", "(num_tokens, num_heads, head_size)", tuple(output.shape))
    for name, tensor in (("prefix_output", prefix_output), ("suffix_output", suffix_output)):
        require_tensor(name, tensor, shape=output.shape, like="output")
    lses = {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse, "output_lse": output_lse}
    for name, tensor in lses.items():
        if tensor is not None or name != "output_lse":
            like = "the heads and tokens of output"
            require_tensor(name, tensor, shape=output.shape[1::-1], like=like)
    outs = torch.stack([prefix_output.float(), suffix_output.float()])
    stacked = torch.stack([prefix_lse, suffix_lse]).transpose(1, 2)  # (2, num_tokens, num_heads)
    merged, lse = merge_states(outs, stacked.masked_fill(stacked == torch.inf, -torch.inf))
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(lse.t())
