"""Whether tensors share memory, so that writing into `out` changes nothing still to be read."""

import torch

SMALL = 1_000_000  # elements whose addresses may be listed one by one


def overlap(a, b):
    """Whether two tensors share a byte: told from their address ranges where these are disjoint,
    exactly where they intersect and both are small, and taken to be so where one is large."""
    if a.device != b.device or a.is_meta or not a.numel() or not b.numel():
        return False
    if a.data_ptr() >= b.data_ptr() + extent(b) or b.data_ptr() >= a.data_ptr() + extent(a):
        return False
    if max(a.numel(), b.numel()) > SMALL:
        return True
    return bool(torch.isin(byte_addresses(a), byte_addresses(b)).any())


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
