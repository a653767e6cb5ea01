"""`out` beside and over inputs, ids that nobody checked, arguments that don't exist."""

from __future__ import annotations

import pytest
import torch
from faults.calls import HEADS, SEQS, SIZE, WRONG, good, ids, refused
from helpers import assert_same, in_each_layout, on_each_device

from paged_attention import paged_attention

pytestmark = pytest.mark.quick


def test_out_may_lie_beside_an_input_but_not_over_it():
    call = good()
    size = call["query"].numel()
    memory = torch.zeros(3 * size)
    memory[:size] = call["query"].flatten()
    call["query"] = memory[:size].view(SEQS, HEADS, SIZE)
    right = paged_attention(**call).clone()
    call["out"] = memory[size : 2 * size].view(SEQS, HEADS, SIZE)
    assert_same(paged_attention(**call), right)
    for shift in (0, 1, size - 1):
        call["out"] = memory[shift : shift + size].view(SEQS, HEADS, SIZE)
        refused(paged_attention, call, ("out", "query"))


def test_out_may_lie_between_the_querys_rows():
    """Both in one packed buffer, as q and the output of a fused projection may be."""
    call = good()
    packed = torch.full((SEQS, 2, HEADS, SIZE), 7.0)
    packed[:, 0] = call["query"]
    right = paged_attention(**call).clone()
    call.update(query=packed[:, 0], out=packed[:, 1])
    assert_same(paged_attention(**call), right)
    assert_same(packed[:, 0], good()["query"], "query")


def test_out_may_not_lie_over_the_metadata():
    call = good()
    memory = torch.zeros(200)
    table = memory[:8].view(torch.int32).view(2, 4)
    table.copy_(call["block_tables"][:, :4])
    lens = memory[8:10].view(torch.int32)
    lens.copy_(call["seq_lens"])
    call.update(block_tables=table, seq_lens=lens)
    out = memory[4:132].view(SEQS, HEADS, SIZE)
    refused(paged_attention, {**call, "out": out}, ("out", "block_tables"))
    out = memory[9:137].view(SEQS, HEADS, SIZE)
    refused(paged_attention, {**call, "out": out}, ("out", "seq_lens"))


@in_each_layout
@pytest.mark.parametrize("bad", [6, -1, 2**31 - 1, -(2**31)])
def test_without_validation_a_bad_live_id_still_gives_no_number_on_a_cpu(layout, bad):
    """Not checked by us, then: but neither clamped nor wrapped into somebody else's block."""
    call = {**good(layout), "validate": False}
    call["block_tables"] = ids(call["block_tables"], ((0, 1), bad))
    with pytest.raises((IndexError, *WRONG)):
        paged_attention(**call)


@on_each_device
def test_lengths_on_the_host_beside_a_cache_elsewhere_are_fine(device):
    call = good(device=device)
    right = paged_attention(**call).clone()
    assert_same(paged_attention(**{**call, "seq_lens": call["seq_lens"].cpu()}), right)


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="blocksize"):
        paged_attention(**good(), blocksize=16)
    with pytest.raises(TypeError):
        call = good()
        paged_attention(
            *(call[k] for k in ("query", "key_cache", "value_cache", "block_tables", "seq_lens")),
            "HND",
        )
