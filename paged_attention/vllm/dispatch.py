"""vLLM's PagedAttention.forward_decode, with the choice between V1 and V2 put back in."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_attention.kernel.partition import ceil_div
from paged_attention.kernel.workspace import Buffers, default_workspace
from paged_attention.vllm.choice import PARTITION_SIZE, partition_size
from paged_attention.vllm.states import Scratch

# The operations' arguments that forward_decode is given, in the operations' order. The operations
# also take block_size, between the first two lists.
BEFORE = "query key_cache value_cache num_kv_heads scale block_tables seq_lens".split()
AFTER = "max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale".split()
BLOCKSPARSE = (
    "tp_rank blocksparse_local_blocks blocksparse_vert_stride blocksparse_block_size "
    "blocksparse_head_sliding_step"
).split()  # from 0.5.3 on, all of them or none


def always_takes_v1(forward_decode: Callable) -> bool:
    """Whether a port's forward_decode calls V1 whatever the lengths are.

    It does if it knows no V2. It also does if the last value that it gives to `use_v1` is True,
    and no condition stands before that, as in CoreX's vLLM 0.6.3. The bytecode tells. Calling the
    function to find out would launch a kernel.
    """
    code = inspect.unwrap(forward_decode).__code__
    if "paged_attention_v1" in code.co_names and "paged_attention_v2" not in code.co_names:
        return True
    steps = list(dis.get_instructions(code))
    value, store = None, 0
    for before, step in zip(steps, steps[1:]):
        if step.opname == "STORE_FAST" and step.argval == "use_v1":
            value, store = before, step.offset
    if value is None or value.opname != "LOAD_CONST" or value.argval is not True:
        return False
    # A jump over the assignment means that an `if` stands around it.
    jumps = [step for step in steps if step.opcode in {*dis.hasjrel, *dis.hasjabs}]
    return not any(step.offset < store < step.argval for step in jumps)


def with_choice(
    forward_decode: Callable, ops: Any, takes_v2: Callable[[int, int, int], bool]
) -> Callable:
    """A forward_decode that chooses between V1 and V2 in each step.

    Args:    forward_decode: the port's own. If it always takes V1, it goes on serving the steps
                   that V1 gets
             ops: the module whose paged_attention_v1 and paged_attention_v2 are looked up in each
                   step
             takes_v2: asked with max_seq_len, num_seqs and num_heads
    Raises:  ValueError: forward_decode lacks an argument of vLLM's, 0.5.3 to 0.11
    Source:  vLLM vllm/attention/ops/paged_attn.py, PagedAttention.forward_decode
    """
    signature = inspect.signature(forward_decode)
    missing = [name for name in BEFORE + AFTER if name not in signature.parameters]
    if missing:
        raise ValueError(f"forward_decode has no argument {', '.join(missing)}: {signature}")
    always_v1 = always_takes_v1(forward_decode)
    blocksparse = [name for name in BLOCKSPARSE if name in signature.parameters]

    @functools.wraps(forward_decode)
    def decode(*args, **kwargs) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, max_seq_len = given["query"], given["max_seq_len"]
        v2 = takes_v2(max_seq_len, *query.shape[:2])
        if always_v1 and not v2:
            return forward_decode(*args, **kwargs)
        arguments = [given[name] for name in BEFORE]
        arguments.append(given["value_cache"].shape[3])  # block_size
        arguments += [given[name] for name in AFTER + blocksparse]
        out = torch.empty_like(query)
        if v2:
            ops.paged_attention_v2(out, *scratch(query, max_seq_len), *arguments)
        else:
            ops.paged_attention_v1(out, *arguments)
        return out

    return decode


def scratch(query: Tensor, max_seq_len: int) -> Scratch:
    """Scratch tensors for V2, in memory that is used again in the next step.

    There is room for partitions of 512 tokens, which a native V2 has, or of ours if they are
    smaller.
    """
    partitions = ceil_div(max_seq_len, min(PARTITION_SIZE, partition_size()))
    shape = (*query.shape[:2], partitions)
    buffers = _scratch_buffers(shape, query.shape[2], query.dtype)
    # Not the kernel's own workspace, because the kernel runs while the scratch is in use.
    buffers = default_workspace(query.device, purpose="scratch of V2").bind(buffers, query)
    return Scratch(buffers.exp_sum(), buffers.max_logits(), buffers.tmp_out())


class _ScratchBuffers(Buffers):
    """Args: shape: (num_seqs, num_heads, num_partitions)"""

    def __init__(self, shape: tuple[int, ...], head_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.exp_sum = self.declare(torch.float32, *shape)
        self.max_logits = self.declare(torch.float32, *shape)
        self.tmp_out = self.declare(dtype, *shape, head_size)


_scratch_buffers = functools.lru_cache(maxsize=16)(_ScratchBuffers)
