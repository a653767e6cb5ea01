"""DecodePlan: a decode step planned once, from its lengths, and run for every layer."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .call import Call, Inputs, check_call
from .checks import check_flag, check_out, checked_device, optional_count, refuse
from .compiled.choice import chosen_backend, sharing_backend
from .compiled.numba_backend import NumbaPlan, run_compiled
from .device import wave_bytes
from .execute import execute
from .layouts import Geometry, cache_shapes
from .options import Options
from .partition import whole_blocks
from .planned import check_planned_for, planned_lengths, planned_prefixes, planned_shape
from .schedule import Schedule
from .shape import StepShape
from .sharing import Prefixes
from .step import Step, StepBuffers, step_buffers
from .transforms import is_traced, refuse_gradients, uncompiled
from .workspace import Workspace, default_workspace

# Tokens. With 24 query heads on 4 KV heads, a partition's states take 0.3 % of its K and V.
PARTITION_SIZE = 1024


@uncompiled
def plan_decode(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    layout: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seq_lens: Sequence[int] | Tensor | None = None,
    num_seqs: int | None = None,
    max_seq_len: int | None = None,
    q_len: int = 1,
    window: int | None = None,
    prefix_lens: Sequence[int] | Tensor | None = None,
    group_of: Sequence[int] | Tensor | None = None,
    partition_size: int | None = None,
    backend: str | None = None,
) -> "DecodePlan":
    """Plan a decode step: how its sequences are cut, in what waves, with what memory.

    Args:    num_heads, num_kv_heads, head_size, block_size, layout: as the tensors of `run` will
                   have them
             dtype: the caches'. The query's is free
             device: the caches'
             seq_lens: (num_seqs,), a list or a CPU tensor, for an exact plan. Its cost follows the
                   tokens, and it holds only for these lengths
             num_seqs, max_seq_len: without seq_lens, for a capacity plan. Its shapes are fixed and
                   its cost follows the capacity. It holds for any lengths up to max_seq_len, which
                   each run reads on the device. It is the kind to capture in a CUDA graph
             q_len: query tokens of each sequence
             window: None, or how many keys a query sees, the newest included. Blocks that no query
                   sees aren't in the plan
             prefix_lens, group_of: None, or lists or CPU tensors, for an exact plan. Sequences of
                   a group begin with the same blocks, which are read once for all of them, from
                   the table row of one of them. prefix_lens: (num_groups,), tokens of whole
                   blocks. group_of: (num_seqs,), a sequence's group, or -1
             partition_size: tokens per partition, rounded up to whole blocks. None: 1,024, or what
                   a wave holds if that is less
             backend: None, "eager" or "numba", as `paged_attention`
    Returns: DecodePlan
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
             ImportError: the backend's compiler isn't installed
    Cost:    host work and a copy of some numbers to the device for each partition, no host read
    Example: a plan for two sequences, whose `run` then serves every layer of the step.
        >>> sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
        >>> plan = plan_decode(**sizes, layout="HND", seq_lens=[3000, 40])
        >>> [(wave.num_items, wave.width) for wave in plan.schedule.waves]
        [(2, 1024), (1, 960), (1, 48)]
        >>> plan.partition_size, plan.workspace_bytes
        (1024, 1225920)
    """
    shape = planned_shape(num_heads, num_kv_heads, head_size, block_size, dtype, q_len, window)
    geometry = Geometry(1, shape.block_size, shape.num_kv_heads, shape.head_size)
    cache_shapes(geometry, layout, dtype)  # which refuses sizes that the layout can't have
    device = checked_device(device)
    how: dict[str, Any] = {"partition_size": partition_size}
    how["backend"] = chosen_backend(backend, device)
    num_seqs = optional_count("num_seqs", num_seqs, least=0)
    max_seq_len = optional_count("max_seq_len", max_seq_len, least=0)
    if seq_lens is not None:
        lengths = planned_lengths(seq_lens, num_seqs, max_seq_len)
        prefixes = planned_prefixes(prefix_lens, group_of, lengths, shape.block_size)
        if prefixes is not None:
            how["backend"] = sharing_backend(backend, device)
        return DecodePlan.exact(shape, layout, device, lengths, prefixes=prefixes, **how)
    for name, value in (("prefix_lens", prefix_lens), ("group_of", group_of)):
        if value is not None:
            refuse(name, "None without seq_lens", value)
    if num_seqs is None or max_seq_len is None:
        refuse("num_seqs, max_seq_len", "given without seq_lens", f"{num_seqs}, {max_seq_len}")
    lengths = [max_seq_len] * num_seqs
    return DecodePlan.capacity(shape, layout, device, lengths, **how)


class DecodePlan:
    """What `plan_decode` returns. Its `run` serves all layers of one step.

    Args:    shape, layout, device, partition_size: as `plan_decode`, checked but for the last
             lengths: tokens of each sequence. If is_capacity, the most that each may have
             wave_budget: most bytes of a wave's K, and of its V, as float32. None: the device's
             backend: as `chosen_backend` returns it
             prefixes: which sequences of an exact plan begin with the same tokens
    """

    def __init__(
        self,
        shape: StepShape,
        layout: str,
        device: torch.device,
        lengths: list[int],
        *,
        is_capacity: bool,
        partition_size: int | None = None,
        wave_budget: int | None = None,
        backend: str = "eager",
        prefixes: Prefixes | None = None,
    ) -> None:
        effective, self.longest = shape, max(lengths, default=0)
        if shape.window is not None and shape.window >= self.longest:
            effective = shape._replace(window=None)  # all keys are in the window
        floats = (wave_budget or wave_bytes(device)) // 4
        # The budget of a wave holds for its K, for its V, and for its logits.
        wave_tokens = max(1, floats // max(shape.num_kv_heads * shape.head_size, shape.num_rows))
        partition_size = optional_count("partition_size", partition_size)
        if partition_size is None:
            partition_size = min(PARTITION_SIZE, wave_tokens)
        self.shape, self.layout, self.device, self.backend = shape, layout, device, backend
        self.num_seqs, self.is_capacity = len(lengths), is_capacity
        self.partition_size = whole_blocks(partition_size, shape.block_size)
        cut = effective, lengths, self.partition_size, wave_tokens
        kind = {"is_capacity": is_capacity, "prefixes": prefixes}
        self._make_schedule = partial(Schedule, *cut, device=device, **kind)
        self._effective = effective
        self.compiled = None
        if backend == "numba":
            self.compiled = NumbaPlan(effective, lengths, self.partition_size, is_capacity)
        # What a run needs, declared:
        self.buffers: Any = self.compiled.buffers if self.compiled else self._step_buffers

    @cached_property
    def schedule(self) -> Schedule:
        """Waves and segments. A plan of another backend than eager makes them when asked for."""
        return self._make_schedule()

    @property
    def _step_buffers(self) -> StepBuffers:
        return step_buffers(self._effective, self.schedule.extent)

    @classmethod
    def exact(
        cls, shape: StepShape, layout: str, device: torch.device, lengths: list[int], **more: Any
    ) -> "DecodePlan":
        """A plan for exactly these lengths."""
        return cls(shape, layout, device, lengths, is_capacity=False, **more)

    @classmethod
    def capacity(
        cls, shape: StepShape, layout: str, device: torch.device, bounds: list[int], **more: Any
    ) -> "DecodePlan":
        """A plan for any lengths up to `bounds`, one for each sequence."""
        return cls(shape, layout, device, bounds, is_capacity=True, **more)

    @property
    def workspace_bytes(self) -> int:
        """What a Workspace holds after it has served this plan."""
        return self.buffers.nbytes

    @uncompiled
    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        scale: float | None = None,
        kv_cache_dtype: str = "auto",
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        alibi_slopes: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        causal: bool = True,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of the new tokens of each sequence. The arguments are `paged_attention`'s.

        Layout, window, partition size and lengths are the plan's. Types, ranks, shapes, dtypes,
        devices and aliasing are checked, but values never are. So the caller must rule out ids
        outside the pool, and lengths beyond what was planned.

        An exact plan doesn't read seq_lens. A capacity plan reads it on the device, and never
        follows a table entry past a sequence's end. A sequence that is longer than the capacity,
        or than its row of the table covers, becomes NaN.

        Nothing is read back to the host. Given `out` and a workspace that has served this plan,
        nothing is allocated but views (and lse).

        Returns: out, or (out, lse)
        Raises:  TypeError, ValueError: the argument, its value, and what it should be
        Example: one plan for all layers
            >>> sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16, "block_size": 4}
            >>> plan = plan_decode(**sizes, layout="HND", seq_lens=[5])
            >>> pool = torch.arange(8.0).view(2, 1, 4, 1).expand(2, 1, 4, 16)
            >>> step = torch.zeros(1, 2, 16), pool, pool, torch.tensor([[1, 0]]), torch.tensor([5])
            >>> [plan.run(*step, v_scale=1.0 + layer)[0, :, 0] for layer in range(2)]
            [tensor([4.4000, 4.4000]), tensor([8.8000, 8.8000])]
        """
        inputs = Inputs(query, key_cache, value_cache, block_tables, seq_lens)
        window = self.shape.window
        options = Options(scale, k_scale, v_scale, alibi_slopes, window, softcap, sinks, causal)
        call = check_call(inputs, self.layout, kv_cache_dtype, options)
        check_planned_for(self, call)
        check_flag("return_lse", return_lse)
        return self.run_checked(call, out, workspace, return_lse)

    def run_checked(
        self, call: Call, out: Tensor | None, workspace: Workspace | None, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`run`, for a call that this plan was made for."""
        query, given = call.inputs.query, call.inputs._asdict() | vars(call.options)
        refuse_gradients(given)
        if workspace is None:
            workspace = default_workspace(self.device)
        elif not isinstance(workspace, Workspace):
            refuse("workspace", "a Workspace", type(workspace).__name__, TypeError)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        else:
            check_out(out, query, given | dict(zip(["workspace"], workspace.tensors())))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
        if self.compiled is not None and not is_traced(query):
            run_compiled(self.compiled, workspace.bind(self.buffers, query), call, out, lse)
        else:
            buffers = workspace.bind(self._step_buffers, query)
            execute(Step(self.schedule, call.options, buffers), call, out, lse)
        return out if lse is None else (out, lse)
