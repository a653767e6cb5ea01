"""Which sequences of a pool begin alike: found from the block tables, where it pays."""

from __future__ import annotations

import pytest
import torch

from paged_attention import (
    PagedKVCache,
    paged_attention,
    plan_decode,
    prefixes,
    shared_prefix_attention,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def always(monkeypatch):
    """However short, a prefix is worth sharing."""
    monkeypatch.setattr(prefixes, "pays", lambda num_tokens, num_seqs: num_tokens > 0)


def pool_of(num_blocks=400, block_size=16):
    torch.manual_seed(0)
    return PagedKVCache(num_blocks, block_size, 2, 16)


def grow(cache, seq_id, tokens):
    slots = cache.extend(seq_id, tokens)
    cache.write(torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16), slots)


def groups_of(cache, seq_ids):
    found = cache.shared_prefixes(seq_ids)
    return found.prefix_lens.tolist(), found.group_of.tolist()


def test_forks_of_a_prompt_are_a_group_and_one_line_decodes_them():
    cache = pool_of()
    grow(cache, "prompt", 1030)
    for name, more in (("a", 1), ("b", 30), ("c", 0), ("d", 17)):
        cache.fork("prompt", name)
        grow(cache, name, more)
    grow(cache, "other", 50)
    names, query = ["b", "other", "a", "d", "c"], torch.randn(5, 6, 16)
    pool = cache.key_cache(), cache.value_cache()
    out = shared_prefix_attention(query, *pool, *cache.shared_prefixes(names), layout="HND")
    tables, lens = cache.block_tables(names), cache.seq_lens(names)
    right = paged_attention(query, *pool, tables, lens, layout="HND")
    assert (out - right).abs().max() < 2e-6
    # The last block of the prompt holds 6 tokens. Whoever went on has a copy of it.
    assert groups_of(cache, names) == ([1024], [0, -1, 0, 0, 0])
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": 16}
    found = cache.shared_prefixes(names)
    words = {"prefix_lens": found.prefix_lens, "group_of": found.group_of}
    plan = plan_decode(**sizes, layout="HND", seq_lens=lens, **words)
    assert torch.equal(plan.run(query, *pool, tables, lens), out)


def test_a_block_that_is_not_full_is_nobodys_prefix(always):
    cache = pool_of()
    grow(cache, "a", 40)
    cache.fork("a", "b")
    assert groups_of(cache, "ab") == ([32], [0, 0])
    found = cache.shared_prefixes("ab")
    assert found.suffix_lens.tolist() == [8, 8] and found.suffix_tables.tolist() == [[2], [2]]


def test_tokens_that_are_reserved_and_not_written_are_nobodys_prefix(always):
    cache = pool_of()
    grow(cache, "a", 16)
    cache.fork("a", "b")
    cache.reserve_all("a", [40])
    assert groups_of(cache, "ab") == ([16], [0, 0])


def test_nobody_shares_and_an_unknown_name_is_a_key_error(always):
    cache = pool_of()
    for name in "abc":
        grow(cache, name, 64)
    assert groups_of(cache, "abc") == ([], [-1, -1, -1])
    assert groups_of(cache, "") == ([], [])
    with pytest.raises(KeyError, match="'z'"):
        cache.shared_prefixes("az")


def test_of_a_tree_the_groups_are_taken_that_save_more(always):
    cache = pool_of()
    grow(cache, "root", 64)
    for name in "abcdefgh":
        cache.fork("root", name)
    grow(cache, "a", 320)
    cache.fork("a", "i")
    # a and i have 384 tokens in common, and the others 64 with them.
    prefix_lens, group_of = groups_of(cache, "abcdi")
    assert [prefix_lens[g] for g in group_of] == [384, 64, 64, 64, 384]
    grow(cache, "b", 16)
    cache.fork("b", "j")  # 80 in common, which save less than staying with the others
    prefix_lens, group_of = groups_of(cache, "abcdij")
    assert [prefix_lens[g] for g in group_of] == [384, 64, 64, 64, 384, 64]


def test_sharing_begins_where_it_pays():
    """The rule is `prefixes.pays`, and nothing else decides."""
    assert prefixes.pays(768, 2) and not prefixes.pays(752, 2)
    assert prefixes.pays(64, 17) and not prefixes.pays(48, 1000)
    cache = pool_of()
    grow(cache, "a", 520)
    for name in "bcd":
        cache.fork("a", name)
    assert groups_of(cache, "ab") == ([], [-1, -1])
    assert groups_of(cache, "abc") == ([512], [0, 0, 0])


def test_the_search_takes_any_number_of_rows_nested_as_deep_as_they_like(always):
    rows = [list(range(n)) for n in range(1500)]
    groups = prefixes._groups(rows, 16)
    members = [row for group in groups for row in group.rows]
    assert len(members) == len(set(members)) and len(members) > 1400
