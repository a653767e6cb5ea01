"""`out` over an input is refused and `out` beside an input is not, whatever their strides are."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import assert_same

from paged_attention import Workspace, paged_attention, plan_decode, reference_attention
from paged_attention.inputs import random_inputs
from paged_attention.kernel.aliasing import overlap, overlaps_itself

pytestmark = pytest.mark.quick


def addresses(tensor):
    """Every byte address, listed one by one: the judge."""
    found = [tensor.data_ptr()]
    for n, stride in zip(tensor.shape, tensor.stride()):
        found = [a + i * stride * tensor.element_size() for a in found for i in range(n)]
    return [a + byte for a in found for byte in range(tensor.element_size())]


def random_view(rng, base):
    dims = rng.randint(1, 3)
    shape = [rng.randint(1, 6) for _ in range(dims)]
    strides = [rng.choice([0, 1, 2, 3, 5, 7, 12, 24, 60]) for _ in range(dims)]
    return base.as_strided(shape, strides, rng.randint(0, 200))


def test_overlap_is_what_a_list_of_all_addresses_says():
    rng, base, told = random.Random(0), torch.zeros(4000), set()
    for _ in range(400):
        a, b = random_view(rng, base), random_view(rng, base)
        right = not set(addresses(a)).isdisjoint(addresses(b))
        assert overlap(a, b) == overlap(b, a) == right, (a.stride(), b.stride())
        assert overlaps_itself(a) == (len(set(addresses(a))) < len(addresses(a))), a.stride()
        told.add(right)
    assert told == {True, False}


def test_large_views_that_take_turns_are_told_apart():
    matrix = torch.zeros(5000, 4000)
    assert not overlap(matrix[:, ::2], matrix[:, 1::2])
    assert overlap(matrix[:, ::2], matrix[:, 2::4])


INPUTS = random_inputs([50, 7, 20], num_heads=6, num_kv_heads=2, head_size=16, layout="HND")
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": 16}


def refused(name, out, run=paged_attention, query=INPUTS.query, tensors=INPUTS[1:], **options):
    before = out.clone()
    with pytest.raises(ValueError, match=f"out must not overlap {name}"):
        run(query, *tensors, out=out, **options)
    assert_same(out, before)


def test_own_04_an_expanded_input_over_out_is_refused_by_name():
    out = torch.randn(3, 6, 16)
    refused("query", out, query=out[:1].expand(3, 6, 16), layout="HND")
    refused("sinks", out, sinks=out.view(-1)[:1].expand(6), layout="HND")
    refused("alibi_slopes", out, alibi_slopes=out[0, 0, :1].expand(6), layout="HND")


def test_out_over_a_part_of_an_input_is_refused_by_name():
    memory = torch.randn(600)
    query = memory[:288].view(3, 6, 16)
    for first in (0, 1, 287):
        refused("query", memory[first : first + 288].view(3, 6, 16), query=query, layout="HND")
    table = memory[:12].view(torch.int32).view(3, 4).copy_(INPUTS.block_tables[:, :4])
    lens = memory[12:15].view(torch.int32).copy_(INPUTS.seq_lens)
    for name, first in (("block_tables", 11), ("seq_lens", 14)):
        out = memory[first : first + 288].view(3, 6, 16)
        refused(name, out, tensors=(*INPUTS[1:3], table, lens), layout="HND")


@pytest.mark.parametrize(
    "lengths", [{"seq_lens": [50, 7, 20]}, {"num_seqs": 3, "max_seq_len": 50}]
)
def test_out_in_the_workspace_is_refused_wherever_it_lies(lengths):
    plan, workspace = plan_decode(**SIZES, layout="HND", **lengths), Workspace()
    plan.run(*INPUTS, workspace=workspace)
    [memory] = workspace.tensors()
    memory.zero_()
    for first in range(0, memory.numel() - 288, 997):
        out = memory[first : first + 288].view(3, 6, 16)
        refused("workspace", out, run=plan.run, workspace=workspace)


def test_out_over_the_other_halves_of_an_inputs_elements_is_refused():
    wide = torch.zeros(3, 6, 16)
    refused("query", wide, query=wide.view(torch.float16)[..., 1::2], layout="HND")


def beside():
    """(out, query, options) that share no byte, query or sinks expanded from one tensor."""
    wide, two, rows = torch.randn(3, 6, 32), torch.randn(3, 12, 16), torch.randn(6, 6, 16)
    return {
        "other lanes": (wide[..., :16], wide[1:2, :, 16:].expand(3, 6, 16), {}),
        "other heads": (two[:, ::2], two[:1, 1::2].expand(3, 6, 16), {}),
        "other rows": (rows[1::2], rows[2:3].expand(3, 6, 16), {}),
        "one head's lanes": (wide[..., :16], wide[:, :1, 16:].expand(3, 6, 16), {}),
        "sinks": (two[:, :6], INPUTS.query, {"sinks": two[0, 11, :1].expand(6)}),
        "what follows": (wide.view(2, 3, 6, 16)[1], wide.view(2, 3, 6, 16)[0], {}),
    }


@pytest.mark.parametrize("case", beside())
def test_own_04_an_expanded_input_beside_out_is_served(case):
    out, query, options = beside()[case]
    right, _ = reference_attention(query, *INPUTS[1:], layout="HND", **options)
    paged_attention(query, *INPUTS[1:], layout="HND", out=out, **options)
    assert (out - right).abs().max() < 2e-6


def test_out_in_a_gap_of_a_large_pool_is_served():
    key, value, gap = torch.randn(600, 3, 2, 16, 64).unbind(1)
    query, out = torch.randn(1, 2, 64), gap[7, :, 0].view(1, 2, 64)
    inputs = query, key, value, torch.tensor([[3, 5]]), torch.tensor([20])
    paged_attention(*inputs, layout="HND", out=out)
    assert (out - reference_attention(*inputs, layout="HND")[0]).abs().max() < 2e-6
