"""`out` over an input is refused and `out` beside an input is not, whatever their strides are."""

from __future__ import annotations

import random

import pytest
import torch

from paged_attention import paged_attention, reference_attention
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


def overlapping(out):
    """Calls that would write what they still have to read."""
    return {
        "query": {"query": out[:1].expand(3, 6, 16)},
        "sinks": {"sinks": out.view(-1)[:1].expand(6)},
        "alibi_slopes": {"alibi_slopes": out[0, 0, :1].expand(6)},
    }


@pytest.mark.parametrize("name", overlapping(torch.zeros(3, 6, 16)))
def test_own_04_an_expanded_input_over_out_is_refused_by_name(name):
    out = torch.randn(3, 6, 16)
    before = out.clone()
    arguments = {"query": INPUTS.query, **overlapping(out)[name]}
    with pytest.raises(ValueError, match=f"out must not overlap {name}"):
        paged_attention(arguments.pop("query"), *INPUTS[1:], layout="HND", out=out, **arguments)
    assert torch.equal(out, before)


def beside():
    """(out, query, options) that share no byte, query or sinks expanded from one tensor."""
    wide, two, rows = torch.randn(3, 6, 32), torch.randn(3, 12, 16), torch.randn(6, 6, 16)
    return {
        "other lanes": (wide[..., :16], wide[1:2, :, 16:].expand(3, 6, 16), {}),
        "other heads": (two[:, ::2], two[:1, 1::2].expand(3, 6, 16), {}),
        "other rows": (rows[1::2], rows[2:3].expand(3, 6, 16), {}),
        "one head's lanes": (wide[..., :16], wide[:, :1, 16:].expand(3, 6, 16), {}),
        "sinks": (two[:, :6], INPUTS.query, {"sinks": two[0, 11, :1].expand(6)}),
    }


@pytest.mark.parametrize("case", beside())
def test_own_04_an_expanded_input_beside_out_is_served(case):
    out, query, options = beside()[case]
    right, _ = reference_attention(query, *INPUTS[1:], layout="HND", **options)
    paged_attention(query, *INPUTS[1:], layout="HND", out=out, **options)
    assert (out - right).abs().max() < 2e-6
