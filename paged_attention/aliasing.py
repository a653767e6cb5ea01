"""Whether tensors share memory, so that writing into `out` changes nothing still to be read."""

import torch

SMALL = 1_000_000  # elements whose addresses may be listed one by one


def overlap(a, b):
    """Whether two tensors share a byte: told from their address ranges, then from their strides
    (two columns of one matrix), then address by address if both are small, and taken to be so if
    one is large."""
    if a.device != b.device or a.is_meta or not a.numel() or not b.numel():
        return False
    if a.data_ptr() >= b.data_ptr() + extent(b) or b.data_ptr() >= a.data_ptr() + extent(a):
        return False
    if _take_turns(a, b):
        return False
    if max(a.numel(), b.numel()) > SMALL:
        return True
    return bool(torch.isin(byte_addresses(a), byte_addresses(b)).any())


def _take_turns(a, b):
    """Whether strides show that no byte is shared: both repeat with one period, and lie in
    different parts of it."""
    for period in {step for tensor in (a, b) for step, _ in _steps(tensor)}:
        if any(step > period and step % period for t in (a, b) for step, _ in _steps(t)):
            continue
        hull_a, hull_b = (
            t.element_size() + sum((n - 1) * step for step, n in _steps(t) if step < period)
            for t in (a, b)
        )
        offset = (b.data_ptr() - a.data_ptr()) % period
        if hull_a <= offset and offset + hull_b <= period:
            return True
    return False


def _steps(tensor):
    """(bytes from one element to the next, elements) of each dimension that has several."""
    itemsize = tensor.element_size()
    return [(step * itemsize, n) for step, n in zip(tensor.stride(), tensor.shape) if n > 1]


def overlaps_itself(tensor):
    """Whether two elements share memory, as in an expanded tensor. Usually told from strides."""
    span = 1  # elements from the first to the last of the dimensions seen, smallest stride first
    for stride, n in sorted(zip(tensor.stride(), tensor.shape)):
        if n > 1 and stride < span:
            addresses = byte_addresses(tensor)
            return len(addresses.unique()) < len(addresses)
        span += (n - 1) * stride
    return False


def extent(tensor):
    """Bytes from a tensor's first element to its last, inclusive."""
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return (steps + 1) * tensor.element_size()


def byte_addresses(tensor):
    """Every byte address the tensor's elements occupy, as an int64 CPU tensor."""
    itemsize = tensor.element_size()
    byte_strides = [stride * itemsize for stride in tensor.stride()]
    addresses = torch.tensor([tensor.data_ptr()], device="cpu")
    for n, step in zip((*tensor.shape, itemsize), (*byte_strides, 1)):
        addresses = (addresses.unsqueeze(-1) + step * torch.arange(n, device="cpu")).flatten()
    return addresses
