"""The numba backend: a plan's work items and memory, and the threads that share the units.

Threads are Python's, because the compiled pass needs no interpreter lock. Each takes the next few
units when it is done with its last ones. So a thread that lost its turn to another process holds
up nothing but its own units. There is no OpenMP here, and so nothing that a fork could break.
"""

import itertools
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..fp8 import element_dtype
from ..layouts import tokens_of
from ..partition import ceil_div, first_needed
from ..shape import StepShape
from ..workspace import Buffers

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as numba_tiles names them
_FLOAT8 = 3
_WORTH_A_THREAD = 2e6  # multiplications. Waking a thread takes as long as some millions of them
_log = logging.getLogger("paged_attention")


class NumbaBuffers(Buffers):
    """What a run needs: the states, copies of what isn't float32 as it is, and the options."""

    def __init__(self, shape: StepShape, num_seqs: int, num_states: int) -> None:
        super().__init__()
        declare, float32, lanes = self.declare, torch.float32, shape.head_size
        self.states = declare(float32, num_states * shape.num_rows * (lanes + 2))
        self.query = declare(float32, num_seqs * shape.num_rows, lanes)
        self.out = declare(float32, num_seqs * shape.num_rows, lanes)
        self.lens = declare(torch.int64, num_seqs)
        self.slopes = declare(float32, shape.num_heads)
        self.sinks = declare(float32, shape.num_heads)
        self.factor = declare(torch.float64, shape.num_kv_heads)  # scale * k_scale
        self.scales = declare(float32, shape.num_kv_heads, 2)  # of logits, and of the result


class NumbaPlan:
    """A decode step's work items, and the buffers that a run needs.

    Args:    lengths: tokens of each sequence. If is_capacity, the most that each may have
             partition_size: tokens, a multiple of the block size
    """

    def __init__(
        self, shape: StepShape, lengths: Sequence[int], partition_size: int, is_capacity: bool
    ) -> None:
        self.shape, self.partition_size, self.is_capacity = shape, partition_size, is_capacity
        self.longest = max(lengths, default=0)
        spans = [self._most_needed(length) for length in lengths]
        parts = [max(1, ceil_div(span, partition_size)) for span in spans]
        several = [n if n > 1 else 0 for n in parts]
        self.items = _int64([(seq, part) for seq, n in enumerate(parts) for part in range(n)])
        self.items = self.items.view(-1, 2)
        self.first_states = _int64([0, *itertools.accumulate(several)][:-1])
        self.lens = _int64(lengths)
        self.has_several = is_capacity or any(several)
        self.work = sum(spans) * shape.num_rows * shape.head_size * 2
        self.buffers = NumbaBuffers(shape, len(lengths), sum(several))

    def _most_needed(self, length: int) -> int:
        """Tokens from the first one needed on, of this length or of any below it."""
        _, _, _, block_size, _, q_len, window = self.shape
        if self.is_capacity and window is not None:
            return min(length, self.shape.tokens_near_window)
        return length - first_needed(length, q_len, window, block_size)


def run_compiled(
    plan: NumbaPlan, buffers: NumbaBuffers, call: Call, out: Tensor, lse: Tensor | None
) -> None:
    """One decode step.

    Args:    buffers: the plan's, lying in a workspace
             out: query's shape;  lse: out.shape[:-1], float32, contiguous, or None
    """
    from numpy import from_dlpack

    from . import numba_decode, numba_merge

    query, key_cache, value_cache, block_tables, seq_lens = call.inputs
    options = call.options
    heads, kv_heads, lanes, block_size, _, q_len, window = plan.shape
    if not len(query):
        return
    lens = buffers.lens().copy_(seq_lens) if plan.is_capacity else plan.lens
    longest = plan.longest
    if plan.is_capacity:
        longest = min(longest, call.covered if key_cache.numel() else 0)
    dtype = element_dtype(key_cache.dtype, call.kv_cache_dtype)
    kind = _KINDS.get(dtype, _FLOAT8)
    keys, values = tokens_of(key_cache, value_cache, call.layout)
    k_strides, v_strides = _strides(keys), _strides(values)
    k_piece = keys.shape[-1]
    direct = kind == 0 and k_piece == lanes and k_strides[-1] == v_strides[-1] == 1
    if query.dtype != torch.float32:
        query = buffers.query(*query.shape).copy_(query)
    result = out
    if out.dtype != torch.float32 or not out.is_contiguous():
        result = buffers.out(*out.shape)
    if not block_tables.is_contiguous():
        block_tables = block_tables.contiguous()
    slopes, sinks = (
        None if given is None else buffer().copy_(given)
        for buffer, given in (
            (buffers.slopes, options.alibi_slopes),
            (buffers.sinks, options.sinks),
        )
    )
    # The two scales of a logit become one number first: each alone may be out of float32's range.
    factor, scales = _filled(buffers.factor(), options.k_scale), buffers.scales()
    assert options.scale is not None
    scales[:, 0].copy_(factor.mul_(options.scale))
    _filled(scales[:, 1], options.v_scale)
    sizes = (
        kv_heads, heads // kv_heads, q_len, lanes, block_size, plan.partition_size,
        block_tables.shape[1], longest, kind, int(block_tables.dtype == torch.int64), k_piece,
        lanes, window or 0, int(options.causal), int(slopes is not None), int(sinks is not None),
        int(lse is not None), int(direct), len(key_cache),
    )  # fmt: skip
    seq, *row, head, lane = query.stride()
    strides = (seq, row[0] if row else 0, head, lane, *k_strides, *v_strides)
    addresses = tuple(
        0 if x is None else x.data_ptr()
        for x in (query, key_cache, value_cache, block_tables, result, lse, buffers.states(),
                  slopes, sinks)
    )  # fmt: skip
    items, first_states, lengths, both_scales, table = map(
        from_dlpack, (plan.items, plan.first_states, lens, scales, _table(dtype))
    )
    softcap = float(options.softcap or 0.0)
    given = sizes, items, first_states, lengths, addresses, strides, both_scales, table, softcap
    _say_what_is_compiled(numba_decode)
    _in_threads(numba_decode.reduce_units, len(items) * kv_heads, plan.work, given)
    if plan.has_several:
        numba_merge.merge(sizes, first_states, lengths, addresses, both_scales)
    if result is not out:
        out.copy_(result)


def _filled(buffer: Tensor, scale: float | Tensor) -> Tensor:
    return buffer.copy_(scale) if isinstance(scale, Tensor) else buffer.fill_(scale)


def _strides(tokens: Tensor) -> tuple[int, int, int, int, int]:
    """Elements from a block, head, slot, piece and lane to the next.

    Args:    tokens: (num_blocks, block_size, num_kv_heads, head_size), or with lanes in pieces
    """
    block, slot, head, *lanes = tokens.stride()
    return block, head, slot, lanes[0] if len(lanes) == 2 else 0, lanes[-1]


_tables: dict[torch.dtype, Tensor] = {}


def _table(dtype: torch.dtype) -> Tensor:
    """(256,), float32: what each byte of an fp8 cache means. Zeros for other dtypes."""
    if dtype not in _tables:
        values = torch.zeros(256, dtype=torch.float32, device="cpu")
        if dtype.itemsize == 1:
            values = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
        _tables[dtype] = values
    return _tables[dtype]


def _int64(numbers: Sequence) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


# -- threads

_lock = threading.Lock()
_executors: dict[tuple[int, int], ThreadPoolExecutor] = {}  # by process, and number of threads


def _helpers(count: int) -> ThreadPoolExecutor:
    """A pool of so many threads. A forked process has none of its parent's, and makes its own."""
    key = os.getpid(), count
    with _lock:
        if key not in _executors:
            _executors.clear()
            _executors[key] = ThreadPoolExecutor(count, thread_name_prefix="paged_attention")
        return _executors[key]


def _in_threads(function: Any, num_units: int, work: float, given: tuple) -> None:
    """Call function(first, end, *given) until all units are done, from several threads at once.

    Raises:  IndexError: a unit says that its block table leaves the pool
    """
    threads = min(torch.get_num_threads(), num_units, max(1, int(work / _WORTH_A_THREAD)))
    if threads == 1:
        _refuse_block(function(0, num_units, *given))
        return
    share = max(1, num_units // (8 * threads))
    starts = itertools.count(0, share)  # next() of it is atomic

    def take_units() -> None:
        for first in starts:
            if first >= num_units:
                return
            _refuse_block(function(first, min(first + share, num_units), *given))

    helpers = [_helpers(threads - 1).submit(take_units) for _ in range(threads - 1)]
    take_units()
    for helper in helpers:
        helper.result()


def _refuse_block(entry: int) -> None:
    if entry >= 0:
        raise IndexError(f"block_tables holds a block outside the pool, in its entry {entry}")


_said: list[bool] = []


def _say_what_is_compiled(module: Any) -> None:
    """One line in the log before the first call compiles, which takes half a minute."""
    if _said:
        return
    _said.append(True)
    folder = Path(module.reduce_units.stats.cache_path)
    if not any(folder.glob("numba_decode.reduce_units-*.nbi")):
        _log.warning("paged_attention compiles its numba backend, once; it is kept in %s", folder)
