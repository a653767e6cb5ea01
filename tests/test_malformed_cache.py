"""What a cache can't be made of or given: refused by name and value, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from faults import WRONG, refused
from helpers import in_each_layout
from pools import NAN

from paged_attention import OutOfBlocks, PagedKVCache

pytestmark = pytest.mark.quick
SIZES = {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_size": 8}
WHOLE = (*SIZES, "num_layers")
CHANGES = [
    *((name, value) for name in WHOLE for value in (-1, 2.5, "4", True, None, NAN)),
    *((name, 0) for name in WHOLE[1:]),
    *(("layout", value) for value in ("XYZ", "hnd", None, 3)),
    *(("dtype", value) for value in (torch.int32, torch.float64, "float32", None)),
]


@pytest.mark.parametrize("name", [*WHOLE, "layout", "dtype"])
def test_a_cache_that_can_not_be_is_refused_by_name_and_value(name):
    for value in (value for n, value in CHANGES if n == name):
        shown = [repr(value), str(value)]
        refused(PagedKVCache, {**SIZES, name: value}, name, shown=shown)
    refused(PagedKVCache, {**SIZES, "layout": "vllm", "head_size": 6}, "head_size", ("6", "4"))


def wrong_writes(key, slots):
    """Per argument: (what to put in its place, words)."""
    return {
        "key": [
            (key.tolist(), "list"), (None, "None"), (key[0], "2, 8"), (key[:, :1], "3, 1, 8"),
            (key[..., :4], "3, 2, 4"), (key.long(), "int64"), (key.to("meta"), "meta"),
            (torch.zeros(4, 2, 8), "4, 2, 8"),
        ],
        "value": [
            (key.tolist(), "list"), (key[:2], "2"), (key[..., :4], "3, 2, 4"),
            (key.to(torch.complex64), "complex64"), (key.to("meta"), "meta"),
        ],
        "slot_mapping": [
            ([0, 1, 2], "list"), (slots.float(), "float32"), (slots[None], "1, 3"),
            (slots + 14, "16"), (torch.tensor([0, 1, 2**32]), "4294967296"),
        ],
        "layer": [(1, "1"), (-1, "-1"), (0.5, "0.5")],
    }  # fmt: skip


@in_each_layout
def test_a_write_that_does_not_fit_is_refused_and_writes_nothing(layout):
    cache = PagedKVCache(**SIZES, layout=layout)
    key, slots = torch.zeros(3, 2, 8), torch.arange(3)
    for cached in (cache.key_cache(), cache.value_cache()):
        cached.fill_(7.0)
    for name, faults in wrong_writes(key, slots).items():
        for wrong, word in faults:
            call = {"key": key, "value": key.clone(), "slot_mapping": slots, name: wrong}
            refused(cache.write, call, name, (word,), error=(*WRONG, IndexError))
            assert (cache.key_cache() == 7.0).all() and (cache.value_cache() == 7.0).all()


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", None, True, NAN])
def test_a_sequence_grows_by_whole_tokens_only(wrong):
    cache = PagedKVCache(**SIZES)
    cache.extend("a", 3)
    call = {"seq_id": "a", "num_tokens": wrong}
    refused(cache.extend, call, "num_tokens", (repr(wrong),))
    with pytest.raises(OutOfBlocks, match="a.*14.*3"):
        cache.extend("a", 14)
    for unknown in (lambda: cache.block_tables(["b"]), lambda: cache.seq_lens(["b"])):
        with pytest.raises(KeyError):
            unknown()
    assert cache.seq_lens(["a"]).tolist() == [3] and cache.num_free_blocks == 3
