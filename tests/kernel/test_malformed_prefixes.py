"""What is no prefix is refused by name and value, and a live id outside the pool by its place."""

from __future__ import annotations

import pytest
import torch
from faults import SIZES, refused

from paged_attention import plan_decode, shared_prefix_attention

pytestmark = pytest.mark.quick
INT = torch.tensor


def good():
    """Blocks of 4 tokens. Two sequences share 8, the third has none."""
    torch.manual_seed(0)
    pool = torch.randn(2, 9, 2, 4, 16)
    return {
        "query": torch.randn(3, 4, 16),
        "key_cache": pool[0],
        "value_cache": pool[1],
        "prefix_tables": INT([[3, 5, -1]]),
        "prefix_lens": INT([8]),
        "suffix_tables": INT([[0, 1], [2, -1], [4, -7]]),
        "suffix_lens": INT([5, 1, 4]),
        "group_of": INT([0, 0, -1]),
        "layout": "HND",
    }


FAULTS = [  # (the argument, what to put there, words)
    ("prefix_lens", INT([6]), ("prefix_lens[0]", "whole blocks", "4", "6")),
    ("prefix_lens", INT([-4]), ("prefix_lens[0]", "-4")),
    ("prefix_lens", INT([16]), ("prefix_lens[0]", "prefix_tables", "12", "16")),
    ("prefix_lens", INT([8, 4]), ("prefix_tables", "2", "1")),
    ("prefix_lens", INT([8.0]), ("float32",)),
    ("prefix_lens", [8], ("list",)),
    ("prefix_lens", INT(8), ()),
    ("prefix_lens", INT([8], device="meta"), ("meta",)),
    ("prefix_tables", INT([3, 5]), ("2",)),
    ("prefix_tables", INT([[3, 5]] * 2), ("2", "1")),
    ("prefix_tables", INT([[3.0, 5]]), ("float32",)),
    ("prefix_tables", INT([[3, 5]], device="meta"), ("meta",)),
    ("prefix_tables", INT([[3, 9]]), ("prefix_tables[0][1]", "9", "group 0")),
    ("prefix_tables", INT([[-1, 5]]), ("prefix_tables[0][0]", "-1")),
    ("prefix_tables", INT([[3, 2**32]]), ("prefix_tables[0][1]", str(2**32))),
    ("suffix_tables", INT([[0, 1], [2, 2]]), ("3", "2")),
    ("suffix_tables", INT([[0, 9], [2, -1], [4, 4]]), ("suffix_tables[0][1]", "9", "sequence 0")),
    ("suffix_tables", INT([[0, 1], [-2, -1], [4, 4]]), ("suffix_tables[1][0]", "-2")),
    ("suffix_tables", None, ("None",)),
    ("suffix_lens", INT([5, -1, 4]), ("suffix_lens[1]", "-1")),
    ("suffix_lens", INT([5, 1, 9]), ("suffix_lens[2]", "suffix_tables", "8", "9")),
    ("suffix_lens", INT([5, 1]), ("2",)),
    ("group_of", INT([0, 1, -1]), ("group_of[1]", "1")),
    ("group_of", INT([0, 0, -2]), ("group_of[2]", "-2")),
    ("group_of", INT([0, 0]), ("2",)),
    ("group_of", INT([True, False, True]), ("bool",)),
    ("group_of", [0, 0, -1], ("list",)),
    ("query", torch.tensor(1.0), ()),
    ("query", torch.randn(2, 4, 16), ()),
    ("window", 0, ("0",)),
    ("backend", "flash", ("flash",)),
    ("key_cache", torch.empty(0, 2, 4, 16), ()),
]


@pytest.mark.parametrize("at", range(len(FAULTS)))
def test_a_fault_of_a_shared_prefix_is_refused_by_name_and_value(at):
    name, value, words = FAULTS[at]
    of = {"query": "suffix" if torch.is_tensor(value) and value.dim() else "query"}
    of["key_cache"] = "cache"
    with pytest.raises((ValueError, TypeError)) as error:
        shared_prefix_attention(**{**good(), name: value})
    said = str(error.value)
    assert of.get(name, name) in said and all(word in said for word in words), said


def test_what_nobody_follows_is_not_refused():
    """Entries past an end, a group that nobody is in, and a prefix before every window."""
    call = good()
    right = shared_prefix_attention(**call)
    call["prefix_tables"] = INT([[3, 5, 2**31 - 1], [-1, 77, 99]])
    call["prefix_lens"] = INT([8, 12])
    assert torch.equal(shared_prefix_attention(**call), right)
    call["prefix_tables"][0, 0] = -5
    with pytest.raises(ValueError, match="prefix_tables"):
        shared_prefix_attention(**call)
    near = shared_prefix_attention(**call, window=5)
    call["prefix_tables"][0, 0] = 3
    assert torch.equal(shared_prefix_attention(**call, window=5), near)


OF_PLANS = [
    ("prefix_lens", [6], ("prefix_lens[0]", "4", "6")),
    ("prefix_lens", [12], ("prefix_lens[0]", "seq_lens[1]", "9", "12")),
    ("prefix_lens", [-4], ("prefix_lens[0]", "-4")),
    ("prefix_lens", [1.5], ("prefix_lens[0]", "1.5")),
    ("prefix_lens", None, ("None",)),
    ("prefix_lens", INT([8], device="meta"), ("meta",)),
    ("group_of", [0, 1, -1], ("group_of[1]", "1")),
    ("group_of", [0, -2, -1], ("group_of[1]", "-2")),
    ("group_of", [0, 0], ("3", "2")),
    ("group_of", None, ("None",)),
]


@pytest.mark.parametrize("at", range(len(OF_PLANS)))
def test_a_plan_refuses_it_too(at):
    name, value, words = OF_PLANS[at]
    plan = {**SIZES, "layout": "HND", "seq_lens": [13, 9, 4]}
    plan |= {"prefix_lens": [8], "group_of": [0, 0, -1]}
    plan_decode(**plan)
    refused(plan_decode, {**plan, name: value}, name, words)


def test_a_capacity_plan_shares_nothing_and_says_so():
    capacity = {**SIZES, "layout": "HND", "num_seqs": 2, "max_seq_len": 9}
    for name, value in (("prefix_lens", [8]), ("group_of", [0, 0])):
        with pytest.raises(ValueError, match=f"{name} must be None without seq_lens"):
            plan_decode(**capacity, **{name: value})
