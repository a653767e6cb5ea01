"""Reused intermediates: the memory that a plan's runs share, so that a run allocates nothing."""

import threading
import weakref

import torch

from paged_attention.kernel.checks import checked_device

ALIGNMENT = 64  # bytes; every buffer begins at a multiple, as torch's own allocations do


class Workspace:
    """Memory for the intermediates of `paged_attention` and `DecodePlan.run`.

    It grows to the largest plan it has served and is never shrunk but by `clear`. What it holds
    between calls is of no meaning. One workspace serves one call at a time: threads, and streams
    of a CUDA device, need one each.

    Args:    device: where it lies; None: the device of the first plan that it serves
    """

    def __init__(self, device=None):
        self.device = None if device is None else checked_device(device)
        self._memory = self._views = None

    @property
    def nbytes(self):
        """Bytes held."""
        return 0 if self._memory is None else 4 * self._memory.numel()

    def tensors(self):
        """The buffers held: none, or one, which everything a run writes to lies in."""
        return [] if self._memory is None else [self._memory]

    def clear(self):
        """Let go of the memory; the next call takes new one."""
        self._memory = self._views = None

    def views(self, buffers, like):
        """Views of the memory as these buffers, remembered until ones of other sizes are asked
        for: the next layer's, and most of the next step's, are the same.

        Args:    like: a tensor of the call, on the device. If a tracer made it, the views lie in
                   memory of their own and nothing is kept, because it is the tracer's
        Raises:  ValueError: the workspace lies on another device
        """
        device = like.device
        if self.device is None:
            self.device = device
        if self.device != device:
            raise ValueError(f"workspace must be on {device} like query, got {self.device}")
        if is_traced(like):
            return Views(buffers, _new_memory(buffers, device))
        views = self._views  # held here: another thread may clear the workspace
        if views is None or views.places != buffers.places:
            memory = self._memory
            if memory is None or 4 * memory.numel() < buffers.nbytes:
                memory = _new_memory(buffers, device)
                self._memory = memory
            views = self._views = Views(buffers, memory)
        return views


def _new_memory(buffers, device):
    with torch.inference_mode(False):  # or it couldn't be written to outside of it
        return torch.empty(buffers.nbytes // 4, dtype=torch.float32, device=device)


def is_traced(tensor):
    """Whether a tracer made this tensor, as FakeTensorMode, make_fx and torch.export do.

    Such a tensor has no memory, or none that outlives the tracing. So what was made beside it may
    not be kept for the next call.
    """
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


class Buffers:
    """Sizes of named buffers, laid one after the other.

    Args:    sizes: name -> (dtype, number of elements)
    """

    def __init__(self, sizes):
        self.places, self.nbytes = {}, 0
        for name, (dtype, numel) in sizes.items():
            self.places[name] = self.nbytes, dtype, numel
            self.nbytes += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Views:
    """Buffers as tensors: `views("logits", 8, 6, 1024)`. A view is made once."""

    def __init__(self, buffers, memory):
        self.places, self._made, self._typed = buffers.places, {}, {torch.float32: memory}

    def __call__(self, name, *shape, dtype=None):
        """The beginning of a buffer, contiguous, of its own dtype unless another is given."""
        view = self._made.get((name, shape, dtype))
        if view is None:
            first_byte, own_dtype, most = self.places[name]
            typed = self._as(dtype or own_dtype)
            strides, numel = [], 1
            for n in reversed(shape):
                strides.append(numel)
                numel *= n
            if numel * typed.itemsize > most * own_dtype.itemsize:
                raise RuntimeError(
                    f"buffer {name} was declared for {most} elements of {own_dtype}, and "
                    f"{shape} of {typed.dtype} would overrun the next one"
                )
            view = typed.as_strided(shape, strides[::-1], first_byte // typed.itemsize)
            self._made[name, shape, dtype] = view
        return view

    def _as(self, dtype):
        """All of the memory, in a dtype."""
        if dtype not in self._typed:
            with torch.inference_mode(False):  # as above
                self._typed[dtype] = self._typed[torch.float32].view(dtype)
        return self._typed[dtype]


# The one piece of global state: a workspace for each (device, stream, thread), for calls that were
# given none. It goes when its thread ends.
_own = threading.local()
_lock = threading.Lock()
_defaults = weakref.WeakSet()


def default_workspace(device):
    """The calling thread's workspace for a device and its current stream.

    On `meta`, which has no memory to reuse, a new one each time: so a count there sees all of it.
    """
    if device.type == "meta":
        return Workspace(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    by_stream = _own.__dict__.setdefault("by_stream", {})
    workspace = by_stream.get((device, stream))
    if workspace is None:
        workspace = by_stream[device, stream] = Workspace(device)
        with _lock:
            _defaults.add(workspace)
    return workspace


def default_workspaces():
    """All threads' default workspaces: what the package keeps between calls."""
    with _lock:
        return list(_defaults)


def clear_default_workspaces():
    """Let go of the memory of all default workspaces."""
    for workspace in default_workspaces():
        workspace.clear()
