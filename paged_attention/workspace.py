"""Reused intermediates: the memory that a plan's runs share, so that a run allocates nothing."""

import threading
import weakref

import torch

ALIGNMENT = 64  # bytes; every buffer begins at a multiple, as torch's own allocations do


class Workspace:
    """Memory for the intermediates of `paged_attention` and `DecodePlan.run`.

    It grows to the largest plan it has served and is never shrunk but by `clear`. What it holds
    between calls is of no meaning. One workspace serves one call at a time: threads, and streams
    of a CUDA device, need one each.

    Args:    device: where it lies; None: the device of the first plan that it serves
    """

    def __init__(self, device=None):
        self.device = None if device is None else torch.empty(0, device=device).device
        self._memory = None

    @property
    def nbytes(self):
        """Bytes held."""
        return 0 if self._memory is None else 4 * self._memory.numel()

    def tensors(self):
        """The buffers held: none, or one, which everything a run writes to lies in."""
        return [] if self._memory is None else [self._memory]

    def clear(self):
        """Let go of the memory; the next call takes new one."""
        self._memory = None

    def reserve(self, num_bytes, device):
        """The buffer, of num_bytes at least.

        Raises:  ValueError: the workspace lies on another device
        """
        if self.device is None:
            self.device = device
        if self.device != device:
            raise ValueError(f"workspace must be on {device} like query, got {self.device}")
        memory = self._memory  # another thread may clear it
        if memory is None or 4 * memory.numel() < num_bytes:
            with torch.inference_mode(False):  # or it couldn't be written to outside of that mode
                memory = torch.empty(-(-num_bytes // 4), dtype=torch.float32, device=device)
            self._memory = memory
        return memory


class Buffers:
    """Named buffers, one after the other in one piece of memory: sizes first, then views."""

    def __init__(self, shapes):
        """shapes: name -> (dtype, shape)"""
        self._places, self.nbytes = {}, 0
        for name, (dtype, shape) in shapes.items():
            numel = 1
            for n in shape:
                numel *= n
            self._places[name] = self.nbytes // 4, dtype, numel, shape
            self.nbytes += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def views(self, memory):
        """name -> its buffer, a view of memory"""
        views = {}
        for name, (first, dtype, numel, shape) in self._places.items():
            words = -(-numel * dtype.itemsize // 4)
            flat = memory[first : first + words].view(dtype)
            views[name] = flat[:numel].view(shape)
        return views


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
