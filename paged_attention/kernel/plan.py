"""DecodePlan: a decode step planned once, from its lengths, and run for every layer."""

import torch

from paged_attention.kernel.checks import (
    FLOATS,
    check_backend,
    check_flag,
    check_out,
    check_tensors,
    checked_count,
    checked_device,
    required_count,
)
from paged_attention.kernel.device import profile_of
from paged_attention.kernel.execute import run
from paged_attention.kernel.fp8 import FLOAT8S
from paged_attention.kernel.layouts import LAYOUTS, Geometry, cache_shapes
from paged_attention.kernel.options import make_options
from paged_attention.kernel.partition import whole_blocks
from paged_attention.kernel.schedule import Heads, Schedule
from paged_attention.kernel.workspace import Workspace, default_workspace

PARTITION_SIZE = 1024  # tokens: the state of 24 heads takes 0.3 % of the K and V of 4


def plan_decode(
    *,
    num_heads,
    num_kv_heads,
    head_size,
    block_size,
    layout,
    dtype=torch.float32,
    device="cpu",
    seq_lens=None,
    num_seqs=None,
    max_seq_len=None,
    q_len=1,
    window=None,
    partition_size=None,
    backend=None,
):
    """Plan a decode step: how its sequences are cut, in what waves, with what memory.

    Args:    num_heads, num_kv_heads, head_size, block_size, layout: as the tensors of `run` will
                   have them
             dtype: the caches'; the query's is free
             device: the caches'
             seq_lens: (num_seqs,), a list or a CPU tensor: an exact plan. Its cost follows the
                   tokens, and it holds only for these lengths
             num_seqs, max_seq_len: without seq_lens: a capacity plan. Its shapes are static and
                   its cost follows the capacity; it holds for any lengths up to max_seq_len,
                   read on the device in each run: the kind to capture in a CUDA graph
             q_len: query tokens of each sequence
             window: None, or how many keys a query sees, the newest included: blocks that none
                   sees aren't in the plan
             partition_size: tokens per partition, rounded up to whole blocks; None: 1,024, or
                   what a wave holds if that is less
             backend: None or "eager"
    Returns: DecodePlan
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
    Cost:    host work in proportion to the partitions, and a copy of some numbers for each to the
             device; no synchronisation
    """
    num_heads = required_count("num_heads", num_heads)
    num_kv_heads = required_count("num_kv_heads", num_kv_heads)
    head_size = required_count("head_size", head_size)
    block_size = required_count("block_size", block_size)
    q_len, window = required_count("q_len", q_len), checked_count("window", window)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if dtype not in (*FLOATS, torch.uint8, *FLOAT8S):
        raise TypeError(
            f"dtype must be float32, float16, bfloat16, uint8 or a float8, got {dtype!r}"
        )
    cache_shapes(Geometry(1, block_size, num_kv_heads, head_size), layout, dtype)
    check_backend(backend)
    heads = Heads(num_heads, num_kv_heads, head_size, block_size, dtype, q_len, window)
    device = checked_device(device)
    lengths = _lengths(seq_lens, num_seqs, max_seq_len)
    return DecodePlan(heads, layout, device, lengths, seq_lens is None, partition_size)


def _lengths(seq_lens, num_seqs, max_seq_len):
    """A list of int: the lengths of an exact plan, the bounds of a capacity plan."""
    if seq_lens is None:
        if num_seqs is None or max_seq_len is None:
            raise ValueError(
                f"num_seqs and max_seq_len must be given where seq_lens isn't, got {num_seqs!r} "
                f"and {max_seq_len!r}"
            )
        max_seq_len = required_count("max_seq_len", max_seq_len, least=0)
        return [max_seq_len] * required_count("num_seqs", num_seqs, least=0)
    if isinstance(seq_lens, torch.Tensor):
        if not seq_lens.is_cpu:
            raise ValueError(f"seq_lens must be on the CPU for a plan, got {seq_lens.device}")
        seq_lens = seq_lens.tolist()
    if not isinstance(seq_lens, (list, tuple)):
        raise TypeError(f"seq_lens must be a list or a CPU tensor, got {seq_lens!r}")
    lengths = [required_count(f"seq_lens[{i}]", n, least=0) for i, n in enumerate(seq_lens)]
    if num_seqs not in (None, len(lengths)):
        raise ValueError(f"num_seqs must be {len(lengths)} like seq_lens, got {num_seqs!r}")
    longest = max(lengths, default=0)
    if max_seq_len is not None and required_count("max_seq_len", max_seq_len, 0) < longest:
        raise ValueError(
            f"max_seq_len must be at least the longest sequence, got {max_seq_len} for {longest}"
        )
    return lengths


class DecodePlan:
    """What `plan_decode` returns: its `run` serves all layers of one step.

    workspace_bytes: what a Workspace holds after it has served this plan
    """

    def __init__(self, heads, layout, device, lengths, static, partition_size):
        """The arguments of `plan_decode`, checked; static: whether lengths are bounds."""
        self.layout, self.device = layout, device
        self.num_seqs, self.static, self.window = len(lengths), static, heads.window
        if heads.window is not None and heads.window >= max(lengths, default=0):
            heads = heads._replace(window=None)  # all keys are in sight
        floats = profile_of(device).wave_bytes // 4
        kv_floats = heads.num_kv_heads * heads.head_size  # a token's, of K or of V
        partition_size = checked_count("partition_size", partition_size)
        if partition_size is None:
            partition_size = min(PARTITION_SIZE, max(1, floats // kv_floats))
        wave_tokens = max(1, floats // max(kv_floats, heads.num_rows))  # or logits, if more
        self.partition_size = whole_blocks(partition_size, heads.block_size)
        self.schedule = Schedule(lengths, static, heads, self.partition_size, wave_tokens, device)

    @property
    def workspace_bytes(self):
        return self.schedule.buffers.nbytes

    def run(
        self,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        *,
        scale=None,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
        alibi_slopes=None,
        softcap=None,
        sinks=None,
        causal=True,
        out=None,
        workspace=None,
        return_lse=False,
    ):
        """Attention of the new tokens of each sequence, as `paged_attention`, which see.

        Layout, window, partition size and lengths are the plan's. Types, ranks, shapes, dtypes,
        devices and aliasing are checked, values never: an id outside the pool, or a length beyond
        what was planned, is the caller's to rule out. An exact plan doesn't read seq_lens; a
        capacity plan reads it on the device, and never follows a table entry past a sequence's
        end. A sequence longer than its capacity, or than its row of the table covers, becomes NaN.

        Nothing is read back to the host and, given `out` and a workspace that has served this
        plan, nothing is allocated but views (and lse).

        Returns: out, or (out, lse)
        Raises:  TypeError, ValueError: the argument, its value, and what it should be
        """
        inputs = query, key_cache, value_cache, block_tables, seq_lens
        _, geometry = check_tensors(*inputs, self.layout, kv_cache_dtype)
        self._check_shapes(inputs, geometry)
        window = self.window
        options = make_options(
            query, geometry, scale, softcap, alibi_slopes, causal, window, sinks, k_scale, v_scale
        )
        check_flag("return_lse", return_lse)
        return self.run_checked(inputs, options, kv_cache_dtype, workspace, out, return_lse)

    def run_checked(self, inputs, options, kv_cache_dtype, workspace, out, return_lse):
        """`run`, for arguments that were checked but for workspace and out."""
        query = inputs[0]
        if workspace is None:
            workspace = default_workspace(self.device)
        elif not isinstance(workspace, Workspace):
            raise TypeError(f"workspace must be a Workspace, got {type(workspace).__name__}")
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        else:
            names = "query", "key_cache", "value_cache", "block_tables", "seq_lens"
            read = dict(zip(names, inputs), workspace=next(iter(workspace.tensors()), None))
            check_out(out, query, read | vars(options))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
        views = workspace.views(self.schedule.buffers, query)
        run(self.schedule, options, inputs, self.layout, kv_cache_dtype, views, out, lse)
        return (out, lse) if return_lse else out

    def _check_shapes(self, inputs, geometry):
        """The tensors are those that were planned for."""
        query, key_cache, _, block_tables, _ = inputs
        heads, longest = self.schedule.heads, self.schedule.longest
        for name, tensor, got, planned in (
            ("query", query, query.device, self.device),
            ("query", query, len(query), self.num_seqs),
            ("query", query, query.shape[-2], heads.num_heads),
            ("query", query, query.shape[1] if query.dim() == 4 else 1, heads.q_len),
            ("key_cache", key_cache, key_cache.dtype, heads.dtype),
            ("key_cache", key_cache, geometry[1:], (heads.block_size, *heads[1:3])),
        ):
            if got != planned:
                raise ValueError(
                    f"{name} must be what was planned for, {planned}, got {got}: "
                    f"{tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}"
                )
        if self.static or not longest:
            return
        covered = block_tables.shape[1] * geometry.block_size
        if covered < longest or not geometry.num_blocks:
            raise ValueError(
                f"block_tables must cover the plan's longest sequence, got "
                f"{block_tables.shape[1]} columns x block size {geometry.block_size} = {covered} "
                f"for {longest} tokens in a pool of {geometry.num_blocks} blocks"
            )
