"""Whether tensors share memory, so that writing into `out` changes nothing still to be read."""

from typing import Any

import numpy
import torch
from torch import Tensor

MAX_WORK = 100_000  # candidate solutions that numpy may try, which takes some milliseconds
shares_memory: Any = numpy.shares_memory  # its type hints allow two limits only


class _Addresses:
    """A tensor's addresses, shape and strides in numpy's array protocol.

    numpy compares addresses and never looks at the memory behind them. So this works on any
    device, and where torch and numpy have no bridge (torch 2.1 beside numpy 2).
    """

    def __init__(self, tensor: Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{itemsize}",  # raw bytes
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
        }


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte.

    The answer is exact for any strides, a stride of 0 included. If numpy can't find it within
    MAX_WORK, the two count as overlapping.
    """
    if a.device != b.device or a.is_meta or not a.numel() or not b.numel():
        return False
    if a.data_ptr() >= _end(b) or b.data_ptr() >= _end(a):  # the usual case, told sooner
        return False
    try:
        return shares_memory(numpy.asarray(_Addresses(a)), numpy.asarray(_Addresses(b)), MAX_WORK)
    except RuntimeError:  # numpy's TooHardError, which has stood in two places
        return True


def _end(tensor: Tensor) -> int:
    """The address past a tensor's last byte."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as they do in an expanded tensor.

    Strides usually tell: each must step over all that the smaller ones reach. Where one doesn't,
    the elements' addresses are listed.
    """
    span = 1  # elements from the first to the last of the dimensions seen so far
    for stride, n in sorted(zip(tensor.stride(), tensor.shape)):
        if n > 1 and stride < span:
            offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
            for length, step in zip(tensor.shape, tensor.stride()):
                steps = step * torch.arange(length, device="cpu")
                offsets = (offsets.unsqueeze(-1) + steps).flatten()
            return len(offsets.unique()) < len(offsets)
        span += (n - 1) * stride
    return False
