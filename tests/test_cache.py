"""PagedKVCache against a dictionary of lists: what was written is read, whoever forked whom.

The model keeps, per sequence, the numbers of the tokens it holds and the blocks it stands on.
After each step tables, lengths, free count and every token of every layer must be as it says.
"""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, assert_close, assert_same, in_each_layout, on_each_device, oracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import LAYOUTS, NAN, empty_caches, load

from paged_attention import OutOfBlocks, PagedKVCache, paged_attention
from paged_attention.inputs import unpack

HEADS, SIZE = 2, 8


def token(number, layer, which):
    """What token `number` holds: different in each layer, head and lane, and in K and V."""
    lane = torch.arange(HEADS * SIZE, dtype=torch.float32).reshape(HEADS, SIZE)
    return (number * 37 + layer * 11 + which * 5) % 1021 + (lane * 3 % 17) / 32


def tokens(numbers, layer, which):
    if not numbers:
        return torch.empty(0, HEADS, SIZE)
    return torch.stack([token(n, layer, which) for n in numbers])


def new_cache(num_blocks=8, block_size=4, layout="HND", num_layers=1, **more):
    cache = PagedKVCache(
        num_blocks, block_size, HEADS, SIZE, num_layers=num_layers, layout=layout, **more
    )
    for layer in range(num_layers):
        cache.key_cache(layer).fill_(NAN)
        cache.value_cache(layer).fill_(NAN)
    return cache


def append(cache, seq_id, numbers, num_layers=1, device="cpu"):
    slots = cache.extend(seq_id, len(numbers))
    for layer in range(num_layers):
        key, value = (tokens(numbers, layer, w).to(device) for w in (0, 1))
        cache.write(key, value, slots, layer)
    return slots


def held(cache, seq_id, block_size, layer=0):
    """A sequence's tokens, read from the pool by the layout's formula."""
    length = cache.seq_lens([seq_id])[0].item()
    ids = cache.block_tables([seq_id])[0].tolist()
    pair = cache.key_cache(layer), cache.value_cache(layer)
    return load(*pair, cache.layout, block_size, ids, length, HEADS, SIZE)


def assert_holds(cache, seq_id, numbers, block_size, num_layers=1):
    assert cache.seq_lens([seq_id]).tolist() == [len(numbers)]
    for layer in range(num_layers):
        for which, got in enumerate(held(cache, seq_id, block_size, layer)):
            right = tokens(numbers, layer, which).to(got)
            assert torch.equal(got, right), f"{seq_id}: layer {layer} {'KV'[which]} is wrong"


def snapshot(cache, ids, num_layers=1):
    pools = [c(n).clone() for n in range(num_layers) for c in (cache.key_cache, cache.value_cache)]
    return cache.num_free_blocks, cache.block_tables(ids), cache.seq_lens(ids), pools


def assert_unchanged(before, after):
    assert before[0] == after[0]
    for a, b in zip((*before[1:3], *before[3]), (*after[1:3], *after[3])):
        assert_same(b, a, "the cache")


# -- the model


class Against(RuleBasedStateMachine):
    """Sequences are 'a' .. 'f'; a block of the model is an object that counts its owners."""

    NAMES = "abcdef"

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        num_layers=st.integers(1, 2),
        layout=st.sampled_from(LAYOUTS),
    )
    def start(self, num_blocks, block_size, num_layers, layout):
        self.num_blocks, self.block_size, self.num_layers = num_blocks, block_size, num_layers
        self.cache = new_cache(num_blocks, block_size, layout, num_layers)
        self.tokens, self.blocks, self.written = {}, {}, 0

    def free_blocks(self):
        return self.num_blocks - len({id(b) for row in self.blocks.values() for b in row})

    def owners(self, block):
        return sum(any(b is block for b in row) for row in self.blocks.values())

    def snapshot(self):
        return snapshot(self.cache, list(self.tokens), self.num_layers)

    @rule(counts=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), max_size=4))
    def extend(self, counts):
        """All of a step's sequences grow, or none. The model grows them one by one."""
        size, before = self.block_size, (dict(self.tokens), dict(self.blocks), self.snapshot())
        for name, count in counts.items():
            old, row = self.tokens.get(name, []), list(self.blocks.get(name, []))
            if count and len(old) % size and self.owners(row[-1]) > 1:
                row[-1] = object()
            row += [object() for _ in range(-(-(len(old) + count) // size) - len(row))]
            self.tokens[name] = old + list(range(self.written, self.written + count))
            self.blocks[name], self.written = row, self.written + count
        if self.free_blocks() < 0:
            self.tokens, self.blocks, unchanged = before
            with pytest.raises(OutOfBlocks):
                self.extend_cache(counts)
            assert_unchanged(unchanged, self.snapshot())
            for name in counts.keys() - self.tokens.keys():
                with pytest.raises(KeyError):
                    self.cache.seq_lens([name])
            return
        slots, right, new = self.extend_cache(counts), [], []
        for (name, count), table in zip(counts.items(), self.cache.block_tables(counts).tolist()):
            end = len(self.tokens[name])
            right += [table[p // size] * size + p % size for p in range(end - count, end)]
            new += self.tokens[name][end - count :]
        assert slots.tolist() == right
        for layer in range(self.num_layers):
            self.cache.write(tokens(new, layer, 0), tokens(new, layer, 1), slots, layer)

    def extend_cache(self, counts):
        if len(counts) == 1:
            [(name, count)] = counts.items()
            return self.cache.extend(name, count)
        return self.cache.extend_all(counts, counts.values())

    @precondition(lambda self: self.tokens)
    @rule(name=st.sampled_from(NAMES), new=st.sampled_from(NAMES))
    def fork(self, name, new):
        if name not in self.tokens or new in self.tokens:
            before = self.snapshot()
            with pytest.raises(KeyError if name not in self.tokens else ValueError):
                self.cache.fork(name, new)
            assert_unchanged(before, self.snapshot())
            return
        self.cache.fork(name, new)
        self.tokens[new], self.blocks[new] = list(self.tokens[name]), list(self.blocks[name])

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 20))
    def truncate(self, name, count):
        if name not in self.tokens or count > len(self.tokens[name]):
            before = self.snapshot()
            with pytest.raises(KeyError if name not in self.tokens else ValueError, match=r"\d|'"):
                self.cache.truncate(name, count)
            assert_unchanged(before, self.snapshot())
            return
        self.cache.truncate(name, count)
        self.tokens[name] = self.tokens[name][:count]
        self.blocks[name] = self.blocks[name][: -(-count // self.block_size)]

    @rule(name=st.sampled_from(NAMES))
    def free(self, name):
        if name not in self.tokens:
            with pytest.raises(KeyError):
                self.cache.free(name)
            return
        self.cache.free(name)
        del self.tokens[name], self.blocks[name]

    @invariant()
    def every_token_is_where_the_model_says(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.num_free_blocks == self.free_blocks()
        names = list(self.tokens)
        lens, tables = self.cache.seq_lens(names), self.cache.block_tables(names)
        assert lens.dtype == tables.dtype == torch.int32
        assert lens.tolist() == [len(self.tokens[n]) for n in names]
        assert tables.dim() == 2 and tables.shape[0] == len(names)
        seen = {}
        for name, row in zip(names, tables.tolist()):
            assert_holds(self.cache, name, self.tokens[name], self.block_size, self.num_layers)
            for block, physical in zip(self.blocks[name], row):
                assert 0 <= physical < self.num_blocks
                assert seen.setdefault(physical, block) is block, "two owners who share nothing"


TestCacheAgainstAModel = Against.TestCase
TestCacheAgainstAModel.settings = settings(stateful_step_count=30)


# -- one claim at a time


@pytest.mark.quick
@on_each_device
@in_each_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_ragged_batch_written_in_steps_is_attended_to_whole(device, layout, dtype):
    cache = new_cache(16, 4, layout, num_layers=2, dtype=dtype, device=device)
    steps = {"x": [5, 1, 1, 6], "y": [1], "z": [8, 3]}
    numbers, count = {name: [] for name in steps}, 0
    for turn in range(4):
        for name, sizes in steps.items():
            if turn < len(sizes):
                new = [n * 7 for n in range(count, count + sizes[turn])]
                count += sizes[turn]
                append(cache, name, new, 2, device)
                numbers[name] += new
    names = ["z", "x", "y"]
    query = torch.linspace(-1, 1, 3 * 4 * SIZE).reshape(3, 4, SIZE).to(dtype)
    for layer in range(2):
        out = paged_attention(
            query.to(device),
            cache.key_cache(layer),
            cache.value_cache(layer),
            cache.block_tables(names),
            cache.seq_lens(names),
            layout=cache.layout,
            scale=1 / 1024,
            out=torch.full((3, 4, SIZE), NAN, device=device),
        )
        dense = [[tokens(numbers[n], layer, w).to(dtype) for n in names] for w in (0, 1)]
        assert_close(out, oracle(query, *dense, 1 / 1024)[0], extra=1e-5)


@pytest.mark.quick
@in_each_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pools_tensors_have_the_layouts_shapes(layout, dtype):
    cache = PagedKVCache(5, 3, HEADS, SIZE, num_layers=2, layout=layout, dtype=dtype)
    key, value = empty_caches(5, 3, HEADS, SIZE, layout, dtype)
    assert cache.layout == layout and cache.num_free_blocks == 5
    for layer in range(2):
        assert cache.key_cache(layer).shape == key.shape and cache.key_cache(layer).dtype == dtype
        assert cache.value_cache(layer).shape == value.shape
    assert cache.key_cache().data_ptr() == cache.key_cache(0).data_ptr()
    assert cache.key_cache(0).data_ptr() != cache.key_cache(1).data_ptr()
    assert PagedKVCache(5, 3, HEADS, SIZE).layout == "HND"


@pytest.mark.quick
@in_each_layout
def test_a_fork_that_goes_on_leaves_its_parent_alone(layout):
    cache = new_cache(8, 4, layout, num_layers=2)
    append(cache, "parent", [0, 1, 2, 3, 4, 5], 2)
    cache.fork("parent", "child")
    assert cache.num_free_blocks == 6
    assert torch.equal(cache.block_tables(["parent"]), cache.block_tables(["child"]))
    append(cache, "child", [100], 2)  # copies the shared, half-full last block, in both layers
    assert cache.num_free_blocks == 5
    append(cache, "parent", [200, 201], 2)  # alone on its last block by now: no copy
    assert cache.num_free_blocks == 5
    assert_holds(cache, "parent", [0, 1, 2, 3, 4, 5, 200, 201], 4, 2)
    assert_holds(cache, "child", [0, 1, 2, 3, 4, 5, 100], 4, 2)
    tables = cache.block_tables(["parent", "child"])
    assert tables[0, 0] == tables[1, 0] and tables[0, 1] != tables[1, 1]


@pytest.mark.quick
def test_a_full_shared_block_is_not_copied():
    cache = new_cache(3, 4)
    append(cache, "parent", [0, 1, 2, 3])
    cache.fork("parent", "child")
    append(cache, "child", [4])
    assert cache.block_tables(["parent", "child"]).tolist() == [[0, -1], [0, 1]]


@pytest.mark.quick
@pytest.mark.parametrize("writers, copies", [("a", 1), ("ab", 2), ("abc", 2)])
def test_a_steps_copies_on_write_are_counted_before_any_is_made(writers, copies):
    """Three share a half-full block; its last owner writes to it as it is."""
    for spare in (copies - 1, copies):
        cache = new_cache(1 + spare, 4)
        append(cache, "a", [0, 1])
        cache.fork("a", "b")
        cache.fork("a", "c")
        before = snapshot(cache, "abc")
        if spare < copies:
            words = f"need {copies} more blocks.*only {spare} of"
            with pytest.raises(OutOfBlocks, match=words):
                cache.extend_all(writers, [1] * len(writers))
            assert_unchanged(before, snapshot(cache, "abc"))
        else:
            slots = cache.extend_all(writers, [1] * len(writers))
            assert len(set(slots.tolist())) == len(writers) and cache.num_free_blocks == 0


@pytest.mark.quick
def test_a_step_that_does_not_fit_extends_none_of_its_sequences():
    cache = new_cache(4, 4)
    append(cache, "a", [0, 1, 2, 3])
    before = snapshot(cache, ["a"])
    with pytest.raises(OutOfBlocks, match=r"'b'.*need 4 more.*\[1, 9\].*only 3 of 4"):
        cache.extend_all(["a", "b"], [1, 9])
    assert_unchanged(before, snapshot(cache, ["a"]))
    with pytest.raises(KeyError):
        cache.seq_lens(["b"])
    append(cache, "b", [5] * 12)
    assert_holds(cache, "b", [5] * 12, 4)


@pytest.mark.quick
def test_reserved_tokens_count_once_they_are_written_and_nobody_sees_them_before():
    cache = new_cache(6, 4)
    append(cache, "a", [0, 1, 2])
    slots = cache.reserve_all(["a", "b"], [6, 2])
    assert cache.num_free_blocks == 2 and cache.seq_lens(["a", "b"]).tolist() == [3, 0]
    cache.fork("a", "fork")  # without what is reserved
    assert cache.block_tables(["fork"]).tolist() == [[0]]
    cache.free("fork")
    assert cache.reserve_all(["a", "b"], [6, 2]).equal(slots)  # the same blocks again
    with pytest.raises(ValueError, match="num_tokens must be what was reserved for 'b', got 5"):
        cache.advance_all(["a", "b"], [6, 5])
    assert cache.seq_lens(["a", "b"]).tolist() == [3, 0]
    cache.advance_all(["a", "b"], [6, 2])
    assert cache.seq_lens(["a", "b"]).tolist() == [9, 2]


@pytest.mark.quick
def test_what_was_reserved_and_not_needed_comes_back():
    cache = new_cache(4, 4)
    append(cache, "a", [0, 1])
    cache.fork("a", "b")
    cache.reserve_all(["a"], [3])  # a copy of the shared block, and another one
    assert cache.num_free_blocks == 1
    cache.truncate("a", 2)
    assert cache.num_free_blocks == 2
    assert_holds(cache, "a", [0, 1], 4)
    assert_holds(cache, "b", [0, 1], 4)
    cache.reserve_all(["a"], [10])
    cache.free("a")
    assert cache.num_free_blocks == 3


@pytest.mark.quick
@in_each_layout
def test_layers_may_have_heads_of_their_own(layout):
    cache = PagedKVCache(4, 4, [2, 1], [8, 16], num_layers=2, layout=layout)
    assert [geometry[2:] for geometry in cache.geometries] == [(2, 8), (1, 16)]
    slots = cache.extend("a", 5)
    written = []
    for layer, (heads, size) in enumerate(((2, 8), (1, 16))):
        key, value = torch.rand(5, heads, size), torch.rand(5, heads, size)
        cache.write(key, value, slots, layer)
        written.append((key, value))
    cache.fork("a", "b")
    cache.extend("b", 1)  # copies the last block, of each layer
    for layer, pair in enumerate(written):
        both = unpack(cache.key_cache(layer), cache.value_cache(layer), layout)
        blocks = cache.block_tables(["b"])[0].long()
        for held, right in zip(both, pair):
            assert torch.equal(held[blocks].flatten(0, 1)[:5], right)
    with pytest.raises(ValueError, match="key must be"):
        cache.write(*written[0], slots, 1)
    for name in ("num_kv_heads", "head_size"):
        sizes = {"num_kv_heads": 1, "head_size": 8, name: [8, 8, 8]}
        with pytest.raises(ValueError, match=f"{name} must be one number, or one for each of 2"):
            PagedKVCache(4, 4, **sizes, num_layers=2)


@pytest.mark.quick
@pytest.mark.parametrize("seq_ids, num_tokens", [("ab", [1]), ("aa", [1, 2]), ("a", [1, 2])])
def test_a_step_names_each_sequence_once_and_its_tokens(seq_ids, num_tokens):
    cache = new_cache(4, 4)
    with pytest.raises(ValueError, match="seq_ids"):
        cache.extend_all(seq_ids, num_tokens)
    assert cache.num_free_blocks == 4


@pytest.mark.quick
def test_blocks_return_when_their_last_owner_leaves():
    cache = new_cache(4, 2)
    append(cache, "a", [0, 1, 2])
    cache.fork("a", "b")
    cache.fork("b", "c")
    for name, free in (("a", 2), ("c", 2), ("b", 4)):
        assert_holds(cache, name, [0, 1, 2], 2)
        cache.free(name)
        assert cache.num_free_blocks == free
    append(cache, "a", [9])  # a freed name begins again
    assert_holds(cache, "a", [9], 2)


@pytest.mark.quick
@in_each_layout
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_negative_slots_are_skipped_when_writing(layout, index_dtype):
    cache = new_cache(4, 2, layout)
    slots = cache.extend("a", 3).to(index_dtype)
    before = cache.key_cache().clone(), cache.value_cache().clone()
    key, value = tokens([1, 2, 3], 0, 0), tokens([1, 2, 3], 0, 1)
    cache.write(key, value, torch.full_like(slots, -1))
    assert_same(cache.key_cache(), before[0], "the pool")
    assert_same(cache.value_cache(), before[1], "the pool")
    cache.write(key, value, torch.stack([slots[0], torch.full_like(slots[1], -1), slots[2]]))
    got_key, got_value = held(cache, "a", 2)
    for got, right in ((got_key, key), (got_value, value)):
        assert torch.equal(got[[0, 2]], right[[0, 2]])
        assert torch.isnan(got[1]).all()


@pytest.mark.quick
@in_each_layout
def test_a_write_touches_its_own_slots_layer_and_nothing_else(layout):
    cache = new_cache(5, 2, layout, num_layers=3)
    slots = cache.extend("a", 3)
    cache.write(tokens([1, 2, 3], 1, 0), tokens([1, 2, 3], 1, 1), slots, layer=1)
    for layer in (0, 2):
        assert torch.isnan(cache.key_cache(layer)).all()
        assert torch.isnan(cache.value_cache(layer)).all()
    for pool in (cache.key_cache(1), cache.value_cache(1)):
        assert (~torch.isnan(pool)).sum() == 3 * HEADS * SIZE


@pytest.mark.quick
@in_each_layout
def test_strided_keys_and_values_are_written_by_value(layout):
    cache = new_cache(5, 2, layout)
    packed = torch.arange(3 * 3 * HEADS * SIZE).float().reshape(3, 3, HEADS, SIZE)
    _, key, value = packed.unbind(1)
    cache.write(key, value, cache.extend("a", 3))
    got_key, got_value = held(cache, "a", 2)
    assert torch.equal(got_key, key) and torch.equal(got_value, value)


@pytest.mark.quick
def test_extending_by_nothing_changes_nothing():
    cache = new_cache(2, 4)
    append(cache, "a", [1, 2, 3])
    before = snapshot(cache, ["a"])
    assert cache.extend("a", 0).shape == (0,)
    assert_unchanged(before, snapshot(cache, ["a"]))


@pytest.mark.quick
def test_unknown_names_are_key_errors_that_say_the_name():
    cache = new_cache()
    append(cache, "a", [1])
    for call in (
        lambda: cache.block_tables(["a", "nobody"]),
        lambda: cache.seq_lens(["nobody"]),
        lambda: cache.fork("nobody", "b"),
        lambda: cache.truncate("nobody", 0),
        lambda: cache.free("nobody"),
    ):
        with pytest.raises(KeyError, match="nobody"):
            call()
    assert cache.num_free_blocks == 7


@pytest.mark.quick
def test_names_may_be_anything_hashable_and_none_at_all():
    cache = new_cache()
    for name in (0, "0", (1, 2)):
        append(cache, name, [3, 4])
    cache.fork(0, -1)
    assert cache.seq_lens([0, "0", (1, 2), -1]).tolist() == [2, 2, 2, 2]
    assert cache.num_free_blocks == 5
    assert cache.seq_lens([]).shape == (0,) and cache.block_tables([]).shape == (0, 0)
