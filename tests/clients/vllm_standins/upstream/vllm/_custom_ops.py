"""Stands in for upstream's: each name calls a PyTorch operation, which may not be registered."""

import torch


def paged_attention_v1(*given):
    torch.ops._C.paged_attention_v1(*given)


def paged_attention_v2(*given):
    torch.ops._C.paged_attention_v2(*given)


def reshape_and_cache(*given):
    torch.ops._C_cache_ops.reshape_and_cache(*given)
