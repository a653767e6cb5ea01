"""vLLM's PagedAttention.forward_decode, with V2 where a port's own has none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paged_attention.kernel.partition import ceil_div
from paged_attention.kernel.workspace import Buffers, default_workspace
from paged_attention.vllm.attention import paged_attention_v2
from paged_attention.vllm.choice import PARTITION_SIZE, is_capturing, partition_size, takes_v2
from paged_attention.vllm.states import Scratch

# The operations' arguments that forward_decode is given, in the operations' order. The operations
# also take block_size, between the first two lists.
BEFORE = "query key_cache value_cache num_kv_heads scale block_tables seq_lens".split()
AFTER = "max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale".split()
BLOCKSPARSE = (
    "tp_rank blocksparse_local_blocks blocksparse_vert_stride blocksparse_block_size "
    "blocksparse_head_sliding_step"
).split()  # from 0.5.3 on, all of them or none


class Arguments:
    """Reads a port's forward_decode's arguments by vLLM's names.

    Raises:  ValueError: forward_decode lacks an argument of vLLM's, 0.5.3 to 0.11
    """

    def __init__(self, forward_decode: Callable) -> None:
        signature = inspect.signature(forward_decode)
        self.names = list(signature.parameters)
        defaults = ((name, p.default) for name, p in signature.parameters.items())
        self.defaults = {name: value for name, value in defaults if value is not inspect._empty}
        self.renamed = "num_kv_heads" not in self.names and "head_mapping" in self.names
        known = {*self.names, "num_kv_heads"} if self.renamed else {*self.names}
        missing = [name for name in BEFORE + AFTER if name not in known]
        if missing:
            raise ValueError(f"forward_decode has no argument {', '.join(missing)}: {signature}")

    def read(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call, or {} if forward_decode can't be called like that."""
        given = {**self.defaults, **dict(zip(self.names, args)), **kwargs}
        if len(args) > len(self.names) or given.keys() != {*self.names}:
            return {}
        if self.renamed:  # as later states of CoreX's port have it
            given["num_kv_heads"] = given["head_mapping"]
        return given


def with_choice(forward_decode: Callable, ops: Any, v1_serves: int) -> Callable:
    """A forward_decode that takes V2 above what V1 serves, instead of by its own rule.

    Args:    ops: the module whose paged_attention_v1 and paged_attention_v2 are looked up in each
                   step
    Raises:  ValueError: forward_decode lacks an argument of vLLM's, 0.5.3 to 0.11
    Source:  vLLM vllm/attention/ops/paged_attn.py, PagedAttention.forward_decode
    """
    arguments = Arguments(forward_decode)

    @functools.wraps(forward_decode)
    def decode(*args: Any, **kwargs: Any) -> Tensor:
        given = arguments.read(args, kwargs)
        if not given:
            return forward_decode(*args, **kwargs)  # which says what is wrong
        if takes_v2(given["max_seq_len"], v1_serves):
            return run_v2(ops.paged_attention_v2, given)
        out = torch.empty_like(given["query"])
        ops.paged_attention_v1(out, *_operands(given))
        return out

    return decode


def with_v2_above(
    forward_decode: Callable,
    v2: Callable,
    v1_serves: int,
    is_beyond_v1: Callable[[Mapping[str, Any]], bool],
    failed: Callable[[Exception, bool], None],
) -> Callable:
    """The forward_decode of a port that always takes V1, with V2 above what V1 serves.

    The port's own serves all other steps. It also serves a step in which V2 raises, because it
    would have without us. A step that V1 would serve wrongly is ours, and our error its caller's.

    Args:    is_beyond_v1: whether V1 would serve a step of these arguments wrongly
             failed: told of an exception of V2's, and whether V2 has ever worked. If it hasn't,
                   it isn't tried again
    Raises:  ValueError: forward_decode lacks an argument of vLLM's, 0.5.3 to 0.11
    """
    arguments = Arguments(forward_decode)
    has_worked, given_up = False, False

    @functools.wraps(forward_decode)
    def decode(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal has_worked, given_up
        given = arguments.read(args, kwargs)
        if given and is_beyond_v1(given):
            return run_v2(paged_attention_v2, given)
        if not given or given_up or not takes_v2(given["max_seq_len"], v1_serves):
            return forward_decode(*args, **kwargs)
        if is_capturing():  # ours can't be captured
            return forward_decode(*args, **kwargs)
        try:
            out = run_v2(v2, given)
        except Exception as error:  # of any kind, because without us the step would be served
            given_up = not has_worked
            failed(error, has_worked)
            return forward_decode(*args, **kwargs)
        has_worked = True
        return out

    return decode


def run_v2(v2: Callable, given: Mapping[str, Any]) -> Tensor:
    """A step by V2, with scratch and a result of its own."""
    query = given["query"]
    out = torch.empty_like(query)
    v2(out, *scratch(query, given["max_seq_len"]), *_operands(given))
    return out


def _operands(given: Mapping[str, Any]) -> list[Any]:
    """What follows `out`, and V2's scratch, in a call of an operation."""
    block_size = given["value_cache"].shape[3]
    after = AFTER + [name for name in BLOCKSPARSE if name in given]
    return [*(given[name] for name in BEFORE), block_size, *(given[name] for name in after)]


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
