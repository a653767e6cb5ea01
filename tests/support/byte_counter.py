"""What each operation reads and writes, told from its tensors: what `cost` has to agree with."""

from __future__ import annotations

import math

from torch.utils._python_dispatch import TorchDispatchMode

from paged_attention.measure.counting import counts_as_op, tensors_in

_ONLY_WRITE = {"zeros_like", "new_zeros", "new_full", "zero_", "fill_"}
_GATHER = {"index", "index_select", "take"}


class ByteCounter(TorchDispatchMode):
    """Every tensor once: dimensions of stride 0 as one, of a gather's source and a scatter's
    target what is picked and what is put there, and nothing of what only lends its dtype."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not counts_as_op(func, name):
            return result
        inputs, outputs = list(tensors_in(args)), list(tensors_in(result))
        if name in _ONLY_WRITE:
            inputs = []
        elif name == "copy_":
            inputs = inputs[1:]
        elif name in _GATHER:
            inputs[0] = outputs[0]
        elif name == "index_copy_":
            inputs = inputs[1:]
            outputs = inputs[1:]
        elif name == "nonzero":
            outputs = []  # what is found is the host's
        self.read += sum(map(real_bytes, inputs))
        self.written += sum(map(real_bytes, outputs))
        return result


def real_bytes(x):
    sizes = (1 if stride == 0 else size for size, stride in zip(x.shape, x.stride()))
    return math.prod(sizes) * x.element_size()
