"""The arguments of one decode step, checked.

`paged_attention`, a plan's run, vLLM's operations and the reference all begin here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, INTS, refuse, require_tensor
from .layouts import Geometry, cache_geometry, check_cache_dtypes, resolve_layout
from .options import Options, check_option_values, checked_options
from .partition import ceil_div, first_needed
from .shape import StepShape
from .transforms import refuse_transforms


class Inputs(NamedTuple):
    """The tensors that every decode step reads."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


class Call(NamedTuple):
    """The arguments of one decode step."""

    inputs: Inputs
    layout: str
    kv_cache_dtype: str
    geometry: Geometry
    options: Options

    @property
    def shape(self) -> StepShape:
        query, (_, block_size, num_kv_heads, head_size) = self.inputs.query, self.geometry
        q_len = query.shape[1] if query.dim() == 4 else 1
        dtype, window = self.inputs.key_cache.dtype, self.options.window
        return StepShape(
            query.shape[-2], num_kv_heads, head_size, block_size, dtype, q_len, window
        )

    @property
    def covered(self) -> int:
        """Tokens that a row of the block table has columns for."""
        return self.inputs.block_tables.shape[1] * self.geometry.block_size


def check_call(inputs: Inputs, layout: str | None, kv_cache_dtype: str, options: Options) -> Call:
    """Check everything about a step's arguments that is not a tensor's value.

    Raises:  TypeError, ValueError: which argument, its value, what it should be
    """
    for name, tensor, dtypes in zip(Inputs._fields, inputs, (FLOATS, None, None, INTS, INTS)):
        require_tensor(name, tensor, dtypes)
        refuse_transforms(name, tensor)
    query, key_cache, value_cache, block_tables, seq_lens = inputs
    check_cache_dtypes(key_cache, value_cache, kv_cache_dtype)
    for name, tensor in zip(Inputs._fields, inputs):
        if tensor.device != query.device and not (tensor is seq_lens and tensor.is_cpu):
            refuse(name, f"on {query.device} like query", tensor.device)
    layout = resolve_layout(key_cache, layout)
    geometry = cache_geometry(key_cache, value_cache, layout)
    _check_query(query, geometry)
    if block_tables.dim() != 2 or len(block_tables) != len(query):
        rule = f"(num_seqs, max_blocks) with num_seqs = {len(query)} like query"
        refuse("block_tables", rule, tuple(block_tables.shape))
    require_tensor("seq_lens", seq_lens, shape=(len(query),))
    options = checked_options(query, geometry, options)
    return Call(inputs, layout, kv_cache_dtype, geometry, options)


def _check_query(query: Tensor, geometry: Geometry) -> None:
    got = tuple(query.shape)
    if query.dim() not in (3, 4):
        rule = "(num_seqs, num_heads, head_size) or (num_seqs, q_len, num_heads, head_size)"
        refuse("query", rule, got)
    if query.dim() == 4 and not got[1]:
        refuse("query", "of a q_len of at least 1", got)
    num_heads, head_size = got[-2:]
    if head_size != geometry.head_size:
        refuse("query's head_size", f"key_cache's, {geometry.head_size}", head_size)
    if num_heads < 1 or num_heads % geometry.num_kv_heads:
        rule = f"a multiple of the cache's num_kv_heads, {geometry.num_kv_heads}"
        refuse("query's num_heads", rule, num_heads)


def lengths_on_host(call: Call, max_seq_len: int | None) -> list[int]:
    """seq_lens as a list, checked. On an accelerator reading them is a synchronisation."""
    lengths, columns = call.inputs.seq_lens.tolist(), call.inputs.block_tables.shape[1]
    for seq, seq_len in enumerate(lengths):
        name = f"seq_lens[{seq}]"
        if seq_len < 0:
            refuse(name, "at least 0", seq_len)
        if max_seq_len is not None and seq_len > max_seq_len:
            refuse(
                "max_seq_len", f"at least the longest sequence, {name} = {seq_len}", max_seq_len
            )
        if seq_len > call.covered:
            table = f"{columns} columns x block size {call.geometry.block_size} = {call.covered}"
            refuse(name, f"at most what its row of block_tables covers, {table}", seq_len)
    return lengths


def check_values(call: Call, lengths: list[int]) -> None:
    """Check what tensors hold: every live block id, and the options.

    On an accelerator this reads block_tables and the options' tensors back to the host.

    Args:    lengths: seq_lens, on the host
    """
    check_option_values(call.options)
    q_len, window, block_size = call.shape.q_len, call.options.window, call.geometry.block_size
    firsts = [first_needed(n, q_len, window, block_size) for n in lengths]
    check_block_ids("block_tables", call.inputs.block_tables, firsts, lengths, call.geometry)


def check_block_ids(
    name: str,
    table: Tensor,
    firsts: list[int],
    ends: list[int],
    geometry: Geometry,
    what: str = "sequence",
) -> None:
    """Check the ids of the blocks that are needed of each row of a table.

    Args:    firsts, ends: the first token needed of each row, and the one past the last
             what: a row stands for
    """
    block_size, num_blocks = geometry.block_size, geometry.num_blocks
    table = table.cpu()
    if not table.numel():
        return
    outside = (table < 0) | (table >= num_blocks)  # (rows, columns)
    if not outside.any():
        return
    columns = torch.arange(table.shape[1], device="cpu")
    past = [ceil_div(end, block_size) for end in ends]
    live = columns < torch.tensor(past, device="cpu").unsqueeze(1)
    if any(firsts):
        before = [first // block_size for first in firsts]
        live &= columns >= torch.tensor(before, device="cpu").unsqueeze(1)
    for row, column in (live & outside).nonzero().tolist():
        block = int(table[row, column])
        raise ValueError(
            f"{name}[{row}][{column}] is block {block}, outside the pool of {num_blocks} "
            f"blocks ({what} {row}, column {column}), so reading it would read memory that is "
            f"not the {what}'s own"
        )
