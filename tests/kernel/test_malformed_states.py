"""States that don't belong together, caches that can't be: refused by name and value."""

from __future__ import annotations

import pytest
import torch
from faults.calls import WRONG, zeros
from helpers import NAN, in_each_layout

from paged_attention import OutOfBlocks, PagedKVCache, merge_states

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "outs, lses, words",
    [
        (zeros(2, 3, 4), zeros(2, 4), ("lses", "2, 4", "2, 3")),
        (zeros(2, 3, 4), zeros(3, 3), ("lses", "3, 3", "2, 3")),
        (zeros(2, 3, 4), zeros(2, 3, 1), ("lses", "2, 3, 1")),
        (zeros(4), zeros(()), ("outs", "4")),
        (zeros(2, 3, 4).int(), zeros(2, 3), ("outs", "int32")),
        (zeros(2, 3, 4), zeros(2, 3).long(), ("lses", "int64")),
        ([zeros(3, 4)], zeros(1, 3), ("outs", "list")),
        (zeros(1, 3, 4), [zeros(3)], ("lses", "list")),
        (zeros(1, 3, 4), zeros(1, 3, device="meta"), ("lses", "meta")),
    ],
)
def test_states_that_do_not_belong_together_are_refused(outs, lses, words):
    with pytest.raises(WRONG) as caught:
        merge_states(outs, lses)
    assert all(word in str(caught.value) for word in words), str(caught.value)


GOOD = {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
WHOLE = ("num_blocks", "block_size", "num_kv_heads", "head_size", "num_layers")


@pytest.mark.parametrize(
    "change, words",
    [
        *(
            ({name: value}, (name, repr(value)))
            for name in WHOLE
            for value in (-1, 2.5, "4", True, None, NAN)
        ),
        *(({name: 0}, (name, "0")) for name in WHOLE[1:]),
        *(({"layout": value}, ("layout", repr(value))) for value in ("XYZ", "hnd", None, 3)),
        ({"layout": "vllm", "head_size": 6}, ("head_size", "6", "4")),
        ({"dtype": torch.int32}, ("dtype", "int32")),
        ({"dtype": torch.float64}, ("dtype", "float64")),
        ({"dtype": "float32"}, ("dtype", "float32")),
        ({"dtype": None}, ("dtype", "None")),
    ],
)
def test_a_cache_that_can_not_be_is_refused_by_name_and_value(change, words):
    with pytest.raises(WRONG) as caught:
        PagedKVCache(**{**GOOD, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


WRITE_FAULTS = {
    "key a list": ("key", lambda x: x.tolist(), ("list",)),
    "key None": ("key", lambda x: None, ("None",)),
    "key of rank 2": ("key", lambda x: x[0], ("2, 8",)),
    "key of other heads": ("key", lambda x: x[:, :1], ("3, 1, 8", "2")),
    "key of another size": ("key", lambda x: x[..., :4], ("3, 2, 4", "8")),
    "key of int64": ("key", lambda x: x.long(), ("int64",)),
    "key on meta": ("key", lambda x: x.to("meta"), ("meta", "cpu")),
    "value a list": ("value", lambda x: x.tolist(), ("list",)),
    "value of fewer tokens": ("value", lambda x: x[:2], ("2",)),
    "value of another size": ("value", lambda x: x[..., :4], ("3, 2, 4",)),
    "value of complex": ("value", lambda x: x.to(torch.complex64), ("complex64",)),
    "value on meta": ("value", lambda x: x.to("meta"), ("meta", "cpu")),
    "slots a list": ("slot_mapping", lambda x: [0, 1, 2], ("list",)),
    "slots of float": ("slot_mapping", lambda x: torch.tensor([0.0, 1.0, 2.0]), ("float32",)),
    "slots of rank 2": ("slot_mapping", lambda x: torch.tensor([[0, 1, 2]]), ("1, 3",)),
    "more tokens than slots": ("key", lambda x: torch.zeros(4, 2, 8), ("4, 2, 8", "3, 2, 8")),
    "a slot beyond the pool": ("slot_mapping", lambda x: torch.tensor([0, 1, 16]), ("16",)),
    "a slot that would wrap": (
        "slot_mapping",
        lambda x: torch.tensor([0, 1, 2**32]),
        ("4294967296",),
    ),
    "a layer too many": ("layer", lambda x: 1, ("1",)),
    "a negative layer": ("layer", lambda x: -1, ("-1",)),
    "a layer of half": ("layer", lambda x: 0.5, ("0.5",)),
}


@in_each_layout
@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_write_that_does_not_fit_is_refused_and_writes_nothing(fault, layout):
    name, wrong, words = WRITE_FAULTS[fault]
    cache = PagedKVCache(**GOOD, layout=layout)
    cache.key_cache().fill_(7.0)
    cache.value_cache().fill_(7.0)
    given = {
        "key": zeros(3, 2, 8),
        "value": zeros(3, 2, 8),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }
    given[name] = wrong(zeros(3, 2, 8))
    with pytest.raises((*WRONG, IndexError)) as caught:
        cache.write(**given)
    missing = [word for word in (name, *words) if word not in str(caught.value)]
    assert not missing, f"{caught.value} doesn't mention {missing}"
    assert (cache.key_cache() == 7.0).all() and (cache.value_cache() == 7.0).all()


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", None, True, NAN])
def test_a_sequence_grows_by_whole_tokens_only(wrong):
    cache = PagedKVCache(**GOOD)
    cache.extend("a", 3)
    with pytest.raises(WRONG) as caught:
        cache.extend("a", wrong)
    assert "num_tokens" in str(caught.value) and repr(wrong) in str(caught.value)
    assert cache.seq_lens(["a"]).tolist() == [3] and cache.num_free_blocks == 3


def test_more_tokens_than_there_are_blocks_change_nothing():
    cache = PagedKVCache(**GOOD)
    cache.extend("a", 3)
    with pytest.raises(OutOfBlocks, match="a.*14.*3"):
        cache.extend("a", 14)
    with pytest.raises(KeyError):
        cache.block_tables(["b"])
    assert cache.seq_lens(["a"]).tolist() == [3] and cache.num_free_blocks == 3
