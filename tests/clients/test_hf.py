"""A model of transformers writes through our cache, and says what it says with its own."""

import pytest
import torch
from helpers import in_each_layout
from hf_models import CACHE, awkward_pool, batch_of, greedy, hf, small_model, transformers

from paged_attention import OutOfBlocks, plan_decode, prefixes
from paged_attention.hf import forward_pass
from paged_attention.hf.attention import attention
from paged_attention.hf.masks import CausalMask

PROMPTS = [[5, 17, 3], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [60], [33, 2, 71, 71, 4]]
NEW = 9
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llama():
    return small_model("Llama")


@pytest.fixture(scope="module")
def right(llama):
    return greedy(llama, batch_of(PROMPTS), NEW, "eager")


def paged(model, prompts=PROMPTS, num_tokens=NEW, pool=None, **more):
    """(tokens, logits, cache) of a batch whose rows are named 0, 1, ..."""
    pool = pool or awkward_pool(model, 40, block_size=4)
    cache = hf.PagedCache(pool, model.config, range(len(prompts)))
    run = greedy(model, batch_of(prompts), num_tokens, "paged_attention", cache, **more)
    return *run, cache


def begin(model, rows="a", num_blocks=4):
    """A cache over blocks of 16, for a model that attends through it."""
    model.set_attn_implementation("paged_attention")
    return hf.PagedCache(awkward_pool(model, num_blocks), model.config, rows)


@torch.no_grad()
def forward(model, cache, ids, mask=None):
    mask = {} if mask is None else {"attention_mask": torch.tensor(mask)}
    return model(torch.tensor(ids), **mask, **{CACHE: cache}).logits


def attend(cache, mask=None, q_len=1, inputs=None, is_token=None, window=None, **options):
    """Layer 0's attention alone, on random inputs."""
    if inputs is None:
        torch.manual_seed(0)
        inputs = [torch.randn(len(cache.seq_ids), heads, q_len, 12) for heads in (6, 2, 2)]
    query, key, value = inputs
    key, value = cache.update(key, value, 0)
    mask = CausalMask(is_token, window) if mask is None else mask
    return attention(None, query, key, value, mask, scaling=0.3, **options)[0]


def assert_same_text(got, right):
    assert torch.equal(got[0], right[0])
    assert (got[1] - right[1]).abs().max() < TOLERANCE


@in_each_layout
def test_a_ragged_batch_is_as_transformers_own_cache_has_it(llama, right, layout):
    pool = awkward_pool(llama, 40, 4, layout=layout)
    assert_same_text(paged(llama, pool=pool), right)


def test_a_prompt_may_be_read_in_pieces(llama):
    """The first pieces of a short row are padding and nothing else."""
    lengths = (50, 3, 11)
    if CACHE != "cache":  # transformers 4 counts positions of pieces otherwise beside padding
        lengths = (50, 50, 50)
    prompts = [[3 + 7 * i * i % (90 - row) for i in range(n)] for row, n in enumerate(lengths)]
    right = greedy(llama, batch_of(prompts), NEW, "eager", prefill_chunk_size=16)
    pool = awkward_pool(llama, 60, 4)
    tokens, logits, cache = paged(llama, prompts, pool=pool, prefill_chunk_size=16)
    assert_same_text((tokens, logits), right)
    assert cache.pool.seq_lens(cache.seq_ids).tolist() == [n + 8 for n in lengths]


def test_a_conversation_goes_on_in_the_same_cache(llama):
    first = batch_of(PROMPTS)
    tokens, _, cache = paged(llama, num_tokens=4)
    said = torch.cat([first.input_ids, tokens, torch.full((4, 3), 50)], dim=1)
    mask = torch.cat([first.attention_mask, torch.ones(4, 7, dtype=torch.long)], dim=1)
    batch = first._replace(input_ids=said, attention_mask=mask)
    again = greedy(llama, batch, 5, "paged_attention", cache)
    assert_same_text(again, greedy(llama, batch, 5, "eager"))


def test_a_model_in_bfloat16_has_a_pool_in_bfloat16():
    model = small_model("Llama").bfloat16()
    _, right = greedy(model, batch_of(PROMPTS), 1, "eager")
    pool = awkward_pool(model, 40, 4, dtype=torch.bfloat16)
    _, logits, _ = paged(model, num_tokens=1, pool=pool)
    assert (logits - right).abs().max() < 0.05 * right.abs().max()


def test_a_row_alone_says_what_it_says_among_others(llama):
    together = paged(llama)
    for row, prompt in enumerate(PROMPTS):
        tokens, logits, _ = paged(llama, [prompt])
        assert torch.equal(tokens[0], together[0][row])
        assert (logits[0] - together[1][row]).abs().max() < TOLERANCE


def test_padding_takes_no_memory(llama):
    *_, cache = paged(llama)
    # The last token that was generated is nowhere: no step read it.
    held = [len(prompt) + NEW - 1 for prompt in PROMPTS]
    assert cache.pool.seq_lens(cache.seq_ids).tolist() == held
    assert 40 - cache.pool.num_free_blocks == sum(-(-n // 4) for n in held)
    assert cache.get_seq_length() == max(held)


def test_a_forward_pass_is_planned_once_for_all_layers(llama, monkeypatch):
    lengths = []

    def noting(**planned):
        lengths.append(planned["seq_lens"])
        return plan_decode(**planned)

    monkeypatch.setattr(forward_pass, "plan_decode", noting)
    paged(llama, [[5, 17, 3]], num_tokens=4)
    assert lengths == [[3], [4], [5], [6]]  # of three layers each


# -- the pool: rows leave, share, run out of it


def test_a_row_that_finishes_frees_its_blocks_and_the_others_do_not_notice(llama, right):
    cache = hf.PagedCache(awkward_pool(llama, 40, 4), llama.config, "abcd")
    free = []

    def finishing(input_ids, scores):
        if input_ids.shape[1] == len(PROMPTS[1]) + 3:
            before = cache.pool.num_free_blocks
            cache.finish(1)
            free.append((before, cache.pool.num_free_blocks))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    tokens, logits = greedy(
        llama, batch_of(PROMPTS), NEW, "paged_attention", cache, stopping_criteria=[finishing]
    )
    assert free == [(free[0][0], free[0][0] + 4)]  # 13 tokens in blocks of 4
    assert cache.pool.seq_lens("abcd").tolist() == [11, 0, 9, 13]
    assert torch.equal(tokens[[0, 2, 3]], right[0][[0, 2, 3]])
    assert (logits - right[1])[[0, 2, 3]].abs().max() < TOLERANCE
    assert torch.equal(tokens[1, :3], right[0][1, :3]) and not logits.isnan().any()


def test_a_prefix_is_stored_once_until_its_heirs_part(llama):
    prefix = PROMPTS[1][:10]
    texts = [[*prefix, 40], [*prefix, 41], [*prefix, 42]]
    right = greedy(llama, batch_of(texts), NEW, "eager")

    pool = awkward_pool(llama, 40, 4)
    llama.set_attn_implementation("paged_attention")
    forward(llama, hf.PagedCache(pool, llama.config, ["prefix"]), [prefix])
    for heir in "abc":
        pool.fork("prefix", heir)
    assert pool.num_free_blocks == 37  # 10 tokens in blocks of 4, for all four
    pool.free("prefix")
    cache = hf.PagedCache(pool, llama.config, "abc")
    assert cache.get_seq_length() == 10
    got = greedy(llama, batch_of(texts), NEW, "paged_attention", cache)
    assert_same_text(got, right)
    tables = pool.block_tables("abc")
    assert (tables[:, :2] == tables[0, :2]).all()  # the full blocks are shared to the end
    assert len(tables[:, 2:].flatten().unique()) == 9  # the others are each one's own
    assert pool.num_free_blocks == 40 - 2 - 9


def test_out_of_blocks_is_said_before_any_row_is_longer_and_the_step_can_be_tried_again(llama):
    """Rows of 4 tokens in blocks of 4: the next step needs a block for each, and there is one."""
    pool = awkward_pool(llama, 3, 4)
    cache = hf.PagedCache(pool, llama.config, "ab")
    llama.set_attn_implementation("paged_attention")
    forward(llama, cache, [[5, 6, 7, 8], [15, 16, 17, 18]])
    held = pool.key_cache().clone()
    with pytest.raises(OutOfBlocks, match="need 2 more blocks.*only 1 of 3 are free"):
        forward(llama, cache, [[9], [19]])
    assert pool.seq_lens("ab").tolist() == [4, 4] and cache.get_seq_length() == 4
    assert pool.num_free_blocks == 1
    assert torch.equal(pool.key_cache().nan_to_num(9), held.nan_to_num(9))
    cache.finish(1)
    logits = forward(llama, cache, [[9], [19]])[0]
    llama.set_attn_implementation("eager")
    right = llama(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -1:]
    assert (logits - right).abs().max() < TOLERANCE


def test_beams_share_what_they_have_in_common(llama):
    batch = batch_of(PROMPTS[:2])
    more = {"max_new_tokens": 7, "num_beams": 3, "do_sample": False, "num_return_sequences": 3}
    llama.set_attn_implementation("eager")
    right = llama.generate(**batch._asdict(), **more)
    pool = awkward_pool(llama, 40, 4)
    cache = hf.PagedCache(pool, llama.config, range(6))
    llama.set_attn_implementation("paged_attention")
    got = llama.generate(**batch._asdict(), **more, **{CACHE: cache})
    assert torch.equal(got, right)
    lens = pool.seq_lens(range(6)).tolist()
    assert 40 - pool.num_free_blocks < sum(-(-n // 4) for n in lens)
    for row in range(6):
        pool.free(row)
    assert pool.num_free_blocks == 40  # nothing else was left in the pool


@pytest.fixture
def shared_waves(monkeypatch):
    """However short, a prefix is worth sharing. The waves that were shared, of each plan."""
    seen = []

    def noted(**sizes):
        plan = plan_decode(**sizes)
        seen.append(sum(wave.sharing is not None for wave in plan.schedule.waves))
        return plan

    monkeypatch.setattr(prefixes, "pays", lambda num_tokens, num_seqs: num_tokens > 0)
    monkeypatch.setattr(forward_pass, "plan_decode", noted)
    return seen


def test_rows_that_go_on_from_one_prompt_read_it_once_and_say_the_same(llama, shared_waves):
    prefix = [3 + 7 * i * i % 90 for i in range(33)]
    texts = [[*prefix, *more] for more in ([40, 9, 8], [41, 5, 6], [42, 7, 70])]
    right = greedy(llama, batch_of(texts), NEW, "eager")
    pool = awkward_pool(llama, 60, 4)
    llama.set_attn_implementation("paged_attention")
    forward(llama, hf.PagedCache(pool, llama.config, ["prefix"]), [prefix])
    for heir in "abc":
        pool.fork("prefix", heir)
    cache = hf.PagedCache(pool, llama.config, "abc")
    shared_waves.clear()
    got = greedy(llama, batch_of(texts), NEW, "paged_attention", cache)
    assert torch.equal(got[0], right[0])
    assert len(shared_waves) == NEW and all(shared_waves)


def test_beams_read_what_they_have_in_common_once_and_say_the_same(llama, shared_waves):
    batch = batch_of([PROMPTS[1] * 3, PROMPTS[3] * 5])
    more = {"max_new_tokens": 7, "num_beams": 3, "do_sample": False, "num_return_sequences": 3}
    llama.set_attn_implementation("eager")
    right = llama.generate(**batch._asdict(), **more)
    cache = hf.PagedCache(awkward_pool(llama, 90, 4), llama.config, range(6))
    llama.set_attn_implementation("paged_attention")
    got = llama.generate(**batch._asdict(), **more, **{CACHE: cache})
    assert torch.equal(got, right)
    assert shared_waves[0] == 0 and all(shared_waves[1:])


def test_a_row_that_goes_on_from_a_finished_one_is_finished(llama):
    *_, cache = paged(llama, PROMPTS[:2], num_tokens=3)
    cache.finish(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.pool.seq_lens([0, 1]).tolist() == [13, 0]
    forward(llama, cache, [[5], [6]])
    assert cache.pool.seq_lens([0, 1]).tolist() == [14, 0]


def test_a_cache_that_is_reset_begins_again(llama, right):
    *_, cache = paged(llama)
    cache.finish(2)
    cache.reset()
    assert cache.pool.num_free_blocks == 40 and cache.get_seq_length() == 0
    again = greedy(llama, batch_of(PROMPTS), NEW, "paged_attention", cache)
    assert_same_text(again, right)


# -- what it refuses, by name


@pytest.mark.parametrize("mask", [[[1, 1, 0]], [[1, 0, 1]], [[1, 1, 1, 1]]])
def test_a_mask_that_is_no_left_padding_is_refused(llama, mask):
    cache = begin(llama)
    with pytest.raises(ValueError, match="attention_mask.*left"):
        forward(llama, cache, [[5, 6, 7]], mask)
    assert cache.pool.num_free_blocks == 4


def test_a_mask_that_hides_what_the_cache_holds_is_refused(llama):
    cache = begin(llama)
    forward(llama, cache, [[5, 6, 7]])
    with pytest.raises(ValueError, match="row's 4 tokens, got 3 ones"):
        forward(llama, cache, [[5]], [[0, 1, 1, 1]])
    assert cache.pool.seq_lens("a").tolist() == [3]


def test_another_mask_than_a_causal_one_is_refused(llama):
    with pytest.raises(ValueError, match="attention_mask.*1, 1, 1, 1"):
        forward(llama, begin(llama), [[5]], [[[[True]]]])
    mask = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["paged_attention"]
    llama.set_attn_implementation("paged_attention")
    for another in (
        {"use_vmap": True},
        {"allow_is_causal_skip": False},
        {"mask_function": lambda row, head, query, key: key >= 0},
        {"mask_function": lambda row, head, query, key: key // 4 == query // 4, "local_size": 4},
    ):
        cache = begin(llama)
        made = mask(batch_size=1, attention_mask=None, **another)
        with pytest.raises(NotImplementedError, match="causal"):
            attend(cache, mask=made)
        assert cache.pool.num_free_blocks == 4


def test_our_cache_with_another_attention_is_refused(llama):
    cache = begin(llama)
    llama.set_attn_implementation("eager")
    with pytest.raises(ValueError, match='set_attn_implementation."paged_attention".*eager'):
        forward(llama, cache, [[5, 6, 7]])


def test_another_cache_than_ours_is_refused(llama):
    llama.set_attn_implementation("paged_attention")
    with pytest.raises(ValueError, match="PagedCache"):
        llama(torch.tensor([[5, 6, 7]]))
    with pytest.raises(ValueError, match="PagedCache"):
        llama.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


def test_rows_that_are_not_the_caches_are_refused(llama):
    cache = begin(llama, "ab")
    with pytest.raises(ValueError, match="seq_ids.*3 rows.*'a', 'b'"):
        forward(llama, cache, [[1]] * 3)
    assert cache.pool.num_free_blocks == 4


def test_what_is_no_config_pool_or_list_of_rows_is_named(llama):
    pool = hf.kv_pool(llama.config, 4)
    for args, name in (
        ((None, llama.config, ["a"]), "pool"),
        ((pool, pool, ["a"]), "config"),
        ((pool, llama.config, 2), "seq_ids"),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be"):
            hf.PagedCache(*args)
    with pytest.raises(TypeError, match="^config must be"):
        hf.kv_pool(llama, 8)
