"""Memory that calls share, so that a run allocates nothing."""

import copy
import math
import threading
from typing import Any, TypeVar

import torch
from torch import Tensor

from .checks import checked_device, refuse
from .transforms import is_traced

ALIGNMENT = 64  # bytes. Every buffer begins at a multiple, as torch's own allocations do


class Buffer:
    """A part of a piece of memory, declared with its largest shape.

    Called with a shape, it gives its beginning as a contiguous tensor: `buffer(8, 6, 1024)`.
    Called without one, it gives all of itself. With `columns` it gives only the first ones of each
    row. A view is made once and remembered, because a run would make some forty of them again.
    """

    __slots__ = ("dtype", "first_byte", "memory", "shape", "views")
    memory: Tensor  # float32. Only what `Buffers.lying_in` gives has it and views of it
    views: dict[tuple, Tensor]

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], first_byte: int) -> None:
        self.dtype, self.shape, self.first_byte = dtype, shape, first_byte

    def __call__(
        self, *shape: int, columns: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        view = self.views.get((shape, columns, dtype))
        if view is None:
            view = self._view(shape or self.shape, columns, dtype or self.dtype)
            self.views[shape, columns, dtype] = view
        return view

    def _view(self, shape: tuple[int, ...], columns: int | None, dtype: torch.dtype) -> Tensor:
        if math.prod(shape) * dtype.itemsize > math.prod(self.shape) * self.dtype.itemsize:
            raise RuntimeError(
                f"a buffer was declared as {self.shape} of {self.dtype}, and {shape} of {dtype} "
                f"would overrun the next one"
            )
        with torch.inference_mode(False):  # or it couldn't be written to outside of it
            typed = self.memory.view(dtype)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        size = shape if columns is None else (*shape[:-1], columns)
        return typed.as_strided(size, strides, self.first_byte // dtype.itemsize)


SomeBuffers = TypeVar("SomeBuffers", bound="Buffers")


class Buffers:
    """Buffers that lie one after the other in one piece of memory.

    A subclass declares each as an attribute, in its __init__: self.logits = self.declare(...).

    nbytes: of all of them
    places: dtype and shape of each. If they are equal, views can be shared
    """

    def __init__(self) -> None:
        self.nbytes, self.places = 0, []

    def declare(self, dtype: torch.dtype, *shape: int) -> Buffer:
        """A buffer after those that were declared before, with room for `shape` elements."""
        buffer = Buffer(dtype, shape, self.nbytes)
        self.nbytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.places.append((dtype, shape))
        return buffer

    def lying_in(self: SomeBuffers, memory: Tensor) -> SomeBuffers:
        """The same buffers, able to give views of memory, (nbytes / 4,) float32."""
        result = copy.copy(self)
        for name, buffer in vars(self).items():
            if isinstance(buffer, Buffer):
                bound = Buffer(buffer.dtype, buffer.shape, buffer.first_byte)
                bound.memory, bound.views = memory, {}
                setattr(result, name, bound)
        return result


class Workspace:
    """Memory for the intermediates of `paged_attention` and `DecodePlan.run`.

    It grows to the largest plan that it has served, and only `clear` makes it smaller. What it
    holds between calls has no meaning. One workspace serves one call at a time, so threads, and
    streams of a CUDA device, need one each.

    Args:    device: where it lies. None: the device of the first plan that it serves
    Example:
        >>> from paged_attention import plan_decode
        >>> sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
        >>> plan, workspace = plan_decode(**sizes, layout="HND", seq_lens=[40]), Workspace()
        >>> pool, lens = torch.zeros(9, 2, 16, 64), torch.tensor([40])
        >>> call = torch.zeros(1, 8, 64), pool, pool, torch.tensor([[7, 2, 5]]), lens
        >>> for layer in range(3):
        ...     out = plan.run(*call, workspace=workspace)
        >>> workspace.nbytes == plan.workspace_bytes
        True
    """

    def __init__(self, device: object = None) -> None:
        self.device = None if device is None else checked_device(device)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._memory is None else 4 * self._memory.numel()

    def tensors(self) -> list[Tensor]:
        """The memory held. It is one tensor, or none before the first call."""
        return [] if self._memory is None else [self._memory]

    def clear(self) -> None:
        """Free the memory. The next call allocates again."""
        self._memory: Tensor | None = None
        self._last: tuple[Buffers, Any] | None = None  # served, and lying in the memory

    def bind(self, buffers: SomeBuffers, like: Tensor) -> SomeBuffers:
        """The buffers, lying in this workspace's memory.

        They are remembered until other ones are asked for, because the next layer's are the same,
        and the next step's mostly are.

        Args:    like: a tensor of the call, on the device. If a tracer made it, the buffers lie in
                 memory of their own and nothing is kept, because it is the tracer's
        Raises:  ValueError: the workspace lies on another device
        """
        self.device = self.device or like.device
        if self.device != like.device:
            refuse("workspace", f"on {like.device} like query", self.device)
        if is_traced(like):
            return buffers.lying_in(_new_memory(buffers.nbytes, like.device))
        last = self._last  # held here, because another thread may clear the workspace
        if last is None or not (last[0] is buffers or last[0].places == buffers.places):
            memory = self._memory
            if memory is None or self.nbytes < buffers.nbytes:
                memory = self._memory = _new_memory(buffers.nbytes, like.device)
            last = self._last = buffers, buffers.lying_in(memory)
        return last[1]


def _new_memory(nbytes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or it couldn't be written to outside of it
        return torch.empty(nbytes // 4, dtype=torch.float32, device=device)


# The one piece of global state: each thread's workspaces, for calls that were given none. They go
# when their thread ends.
_own = threading.local()


def default_workspace(device: torch.device, purpose: str = "kernel") -> Workspace:
    """The calling thread's workspace for a device, its current stream, and a purpose.

    On `meta`, which has no memory to keep, each call gets a new one. So a count there sees all
    that a first call allocates.
    """
    if device.type == "meta":
        return Workspace(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    own: dict[tuple, Workspace] = _own.__dict__.setdefault("workspaces", {})
    if (device, stream, purpose) not in own:
        own[device, stream, purpose] = Workspace(device)
    return own[device, stream, purpose]
