"""The arguments of a plan, checked. Those of its runs are in `call.py`."""

from typing import Any

import torch
from torch import Tensor

from .call import Call
from .checks import FLOATS, INTS, optional_count, refuse, require_tensor, required_count
from .fp8 import FLOAT8S
from .shape import StepShape
from .sharing import Prefixes


def planned_shape(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    q_len: int,
    window: int | None,
) -> StepShape:
    """The sizes of a plan, checked."""
    shape = StepShape(
        required_count("num_heads", num_heads),
        required_count("num_kv_heads", num_kv_heads),
        required_count("head_size", head_size),
        required_count("block_size", block_size),
        dtype,
        required_count("q_len", q_len),
        optional_count("window", window),
    )
    if shape.num_heads % shape.num_kv_heads:
        refuse("num_heads", f"a multiple of num_kv_heads, {num_kv_heads}", num_heads)
    if not isinstance(dtype, torch.dtype) or dtype not in (*FLOATS, torch.uint8, *FLOAT8S):
        refuse("dtype", "float32, float16, bfloat16, uint8 or a float8", repr(dtype), TypeError)
    return shape


def planned_lengths(seq_lens: object, num_seqs: int | None, max_seq_len: int | None) -> list[int]:
    """The lengths of an exact plan, checked."""
    lengths = _planned_numbers("seq_lens", seq_lens, 0)
    if num_seqs not in (None, len(lengths)):
        refuse("num_seqs", f"{len(lengths)} like seq_lens", num_seqs)
    longest = max(lengths, default=0)
    if max_seq_len is not None and max_seq_len < longest:
        refuse("max_seq_len", f"at least the longest sequence, {longest}", max_seq_len)
    return lengths


def planned_prefixes(
    prefix_lens: object, group_of: object, lengths: list[int], block_size: int
) -> Prefixes | None:
    """The prefixes of an exact plan, checked.

    Args:    lengths: tokens of each sequence, those of its prefix included
    """
    if prefix_lens is None and group_of is None:
        return None
    lens = _planned_numbers("prefix_lens", prefix_lens, 0)
    groups = _planned_numbers("group_of", group_of, -1)
    if len(groups) != len(lengths):
        refuse("group_of", f"of {len(lengths)} numbers, one for each sequence", len(groups))
    check_prefixes(lens, groups, block_size)
    for seq, (seq_len, group) in enumerate(zip(lengths, groups)):
        if group >= 0 and lens[group] > seq_len:
            rule = f"at most the length of its sequences, and seq_lens[{seq}] is {seq_len}"
            refuse(f"prefix_lens[{group}]", rule, lens[group])
    return Prefixes(lens, groups)


def check_prefixes(lens: list[int], group_of: list[int], block_size: int) -> None:
    """Check that prefixes are whole blocks, and that groups exist."""
    for group, tokens in enumerate(lens):
        if tokens < 0 or tokens % block_size:
            rule = f"whole blocks, a multiple of {block_size} tokens that is at least 0"
            refuse(f"prefix_lens[{group}]", rule, tokens)
    for seq, group in enumerate(group_of):
        if not -1 <= group < len(lens):
            rule = f"one of the {len(lens)} groups, from 0, or -1 for none"
            refuse(f"group_of[{seq}]", rule, group)


def _planned_numbers(name: str, numbers: object, least: int) -> list[int]:
    if isinstance(numbers, Tensor):
        require_tensor(name, numbers, INTS)
        if not numbers.is_cpu:
            refuse(name, "on the CPU for a plan", numbers.device)
        numbers = numbers.tolist()
    if not isinstance(numbers, (list, tuple)):
        refuse(name, "a list or a CPU tensor", repr(numbers), TypeError)
    return [required_count(f"{name}[{i}]", n, least) for i, n in enumerate(numbers)]


def check_planned_for(plan: Any, call: Call) -> None:
    """Check that the tensors are those that were planned for."""
    inputs = call.inputs
    wanted = (plan.device, plan.num_seqs, *plan.shape)
    got = (inputs.query.device, len(inputs.query), *call.shape)
    for size, want, have in zip(("device", "num_seqs", *plan.shape._fields), wanted, got):
        if have != want:
            of_query = size in ("device", "num_seqs", "num_heads", "q_len")
            name = "query" if of_query else "key_cache"
            rule = f"what was planned for, {want} of {size}"
            refuse(name, rule, f"{have}: {tuple(getattr(inputs, name).shape)}")
    longest, num_blocks = plan.longest, call.geometry.num_blocks
    if not plan.is_capacity and longest and (call.covered < longest or not num_blocks):
        columns = inputs.block_tables.shape[1]
        rule = f"wide enough for the plan's longest sequence, {longest} tokens"
        got = f"{columns} columns, which cover {call.covered}, and {num_blocks} blocks"
        refuse("block_tables", rule, got)
