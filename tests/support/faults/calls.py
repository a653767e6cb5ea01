"""A call that works, for faults to be put into, and what a refusal must be."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, paged, random, to

SEQS, HEADS, KV_HEADS, SIZE, BLOCK, LENS = 2, 4, 2, 16, 4, [7, 3]
WRONG = (ValueError, TypeError)


def good(layout="HND", dtype=torch.float32, device="cpu"):
    """A call that works: its arguments by name, `out` full of a number to be left alone."""
    dense = to(random(LENS, HEADS, KV_HEADS, SIZE, seed=1, dtype=dtype), device=device)
    pool = paged(dense, BLOCK, layout, device=device)
    return {
        "query": dense.query,
        **pool._asdict(),
        "layout": layout,
        "out": torch.full_like(dense.query, 7.0),
    }


def untouched(call):
    return {
        k: bits(v).clone()
        for k, v in call.items()
        if isinstance(v, torch.Tensor) and not v.is_meta and v.layout == torch.strided
    }


def refused(function, call, words, error=WRONG):
    """An error with these words, and every tensor of the call as it was."""
    before = untouched(call)
    with pytest.raises(error) as caught:
        function(**call)
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{message!r} doesn't mention {missing}"
    for name, copy in before.items():
        assert_same(bits(call[name]), copy, name)


def bits(tensor):
    """fp8 as bytes, which every torch can compare."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def ids(tensor, *changes):
    tensor = tensor.clone()
    for where, value in changes:
        tensor[where] = value
    return tensor


def zeros(*shape, **how):
    return torch.zeros(*shape, **how)
