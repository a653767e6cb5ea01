"""What nobody does at first, and somebody does at last. Eager attention says what is right."""

import copy

import pytest
import torch
from hf_models import CACHE, awkward_pool, batch_of, greedy, hf, small_model
from test_hf import PROMPTS, attend, begin, forward, paged
from test_hf_field_cases import assert_near, judged


@pytest.fixture(scope="module")
def llama():
    return small_model("Llama")


# -- rows


def test_sampling_several_texts_of_each_prompt(llama):
    batch = batch_of(PROMPTS[:2])
    more = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "top_k": 20}
    texts = []
    for implementation in ("eager", "paged_attention"):
        cache = hf.PagedCache(awkward_pool(llama, 40, 4), llama.config, range(6))
        llama.set_attn_implementation(implementation)
        if implementation != "eager":
            more[CACHE] = cache
        torch.manual_seed(7)
        texts.append(llama.generate(**batch._asdict(), **more))
    assert torch.equal(*texts)
    assert len({tuple(text) for text in texts[0].tolist()}) == 6


def test_a_row_that_has_said_its_end_is_padded_until_the_others_have(llama):
    batch = batch_of(PROMPTS)
    tokens = greedy(llama, batch, 9, "eager")[0]
    ends = {"eos_token_id": [tokens[0, 2].item(), tokens[2, 5].item()], "min_new_tokens": 0}
    right = greedy(llama, batch, 9, "eager", **ends)
    assert (right[0] == 0).any()  # a row was padded
    got = paged(llama, **ends)
    assert torch.equal(got[0], right[0])
    assert (got[1] - right[1]).abs().max() < 1e-4


def test_a_row_of_nothing_but_padding_sees_nothing_and_the_others_do_not_notice(llama):
    cache, ids = begin(llama, "ab"), [[0, 0, 0], [7, 8, 9]]
    logits = forward(llama, cache, ids, [[0, 0, 0], [1, 1, 1]])
    assert not logits.isnan().any() and cache.pool.seq_lens("ab").tolist() == [0, 3]
    assert_near(logits, judged(llama, [[7, 8, 9]]))
    # Its text begins later, at the position that the columns before have counted up to.
    logits = forward(llama, cache, [[20], [21]], [[0, 0, 0, 1], [1, 1, 1, 1]])
    assert_near(logits[:1], judged(llama, [[20]]))
    assert_near(logits, judged(llama, [[7, 8, 9, 21]]))


def test_one_row_needs_no_mask(llama):
    cache = begin(llama)
    for piece in ([[5, 6, 7]], [[8]], [[9, 10]]):
        logits = forward(llama, cache, piece)
    assert_near(logits, judged(llama, [[5, 6, 7, 8, 9, 10]]))


def test_forks_of_other_lengths_need_positions_of_their_own(llama):
    """By themselves positions are the batch's columns, which skip some of the shorter row."""
    cache, texts = begin(llama, "ab", num_blocks=8), [[5, 6, 7, 8], [15, 16, 17]]
    for row, text in zip("ab", texts):
        forward(llama, hf.PagedCache(cache.pool, llama.config, row), [text])
    again = hf.PagedCache(cache.pool, llama.config, "ab")
    with pytest.raises(ValueError, match=r"position_ids\[1\] must be 3 and on"):
        forward(llama, again, [[9], [18]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    more = {"attention_mask": mask, "position_ids": torch.tensor([[4], [3]]), CACHE: again}
    with torch.no_grad():
        logits = llama(torch.tensor([[9], [18]]), **more).logits
    for row, text in enumerate(([5, 6, 7, 8, 9], [15, 16, 17, 18])):
        assert_near(logits[: row + 1], judged(llama, [text]))


def test_a_text_that_began_after_its_padding_goes_on_from_there_in_another_cache(llama):
    cache = begin(llama, "ab", num_blocks=8)
    forward(llama, cache, [[5, 6, 7, 8], [0, 15, 16, 17]], [[1, 1, 1, 1], [0, 1, 1, 1]])
    cache.pool.fork("b", "c")
    for row in "bc":
        again = hf.PagedCache(cache.pool, llama.config, row)
        with pytest.raises(ValueError, match=r"position_ids\[0\] must be 4 and on"):
            forward(llama, again, [[18]])  # position 3, because the row holds 3 tokens
        more = {"position_ids": torch.tensor([[4]]), CACHE: again}
        with torch.no_grad():
            logits = llama(torch.tensor([[18]]), **more).logits
        assert_near(logits, judged(llama, [[15, 16, 17, 18]]))


# -- caches


def test_two_caches_on_one_pool_do_not_notice_each_other(llama):
    pool = awkward_pool(llama, 16)
    one, two = (hf.PagedCache(pool, llama.config, [name]) for name in "ab")
    for a, b in zip([[5, 6, 7], [8], [9]], [[15, 16], [17, 18], [19]]):
        logits = forward(llama, one, [a]), forward(llama, two, [b])
    assert_near(logits[0], judged(llama, [[5, 6, 7, 8, 9]]))
    assert_near(logits[1], judged(llama, [[15, 16, 17, 18, 19]]))


def test_two_caches_on_one_row_are_noticed(llama):
    pool = awkward_pool(llama, 4)
    one, two = (hf.PagedCache(pool, llama.config, ["a"]) for _ in range(2))
    forward(llama, one, [[5, 6]])
    with pytest.raises(ValueError, match=r"seq_ids.*\[0\] tokens.*\[2\]: somebody else"):
        forward(llama, two, [[5, 6]])


def test_a_row_that_somebody_freed_is_named_and_reset_brings_it_back(llama):
    cache = begin(llama)
    forward(llama, cache, [[5, 6]])
    cache.pool.free("a")
    with pytest.raises(KeyError, match="'a' is not in the cache"):
        forward(llama, cache, [[7]])
    cache.reset()
    assert_near(forward(llama, cache, [[7]]), judged(llama, [[7]]))


def test_reset_in_the_middle_of_a_text(llama):
    cache = begin(llama)

    class Reset:
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 6:
                cache.reset()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    more = {"max_new_tokens": 6, "do_sample": False, "stopping_criteria": [Reset()], CACHE: cache}
    with pytest.raises(ValueError, match="position_ids|attention_mask"):
        llama.generate(torch.tensor([[5, 6, 7]]), **more)
    cache.reset()
    assert_near(forward(llama, cache, [[7]]), judged(llama, [[7]]))


def test_another_number_of_rows_needs_another_cache(llama):
    cache = begin(llama, "ab")
    forward(llama, cache, [[5], [6]])
    for rows in ([[5]], [[5], [6], [7]]):
        with pytest.raises(ValueError, match="seq_ids must be a name for each"):
            forward(llama, cache, rows)
    with pytest.raises(ValueError, match="beam_idx must be a row for each of 2"):
        cache.reorder_cache(torch.tensor([0]))
    assert cache.pool.seq_lens("ab").tolist() == [1, 1]


def test_a_copy_of_a_cache_has_a_pool_of_its_own(llama):
    cache = begin(llama)
    forward(llama, cache, [[5, 6, 7]])
    other = copy.deepcopy(cache)
    assert_near(forward(llama, other, [[8]]), judged(llama, [[5, 6, 7, 8]]))
    assert_near(forward(llama, cache, [[9]]), judged(llama, [[5, 6, 7, 9]]))
    with pytest.raises(NotImplementedError, match="without the others"):
        copy.deepcopy(cache.layers[0])


def test_a_pool_of_another_model_is_refused(llama):
    other = small_model("Llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match="pool must be one of 3 layers.*got 2 layers"):
        hf.PagedCache(hf.kv_pool(other.config, 4), llama.config, ["a"])
    wide = small_model("Llama", num_key_value_heads=6)
    cache = hf.PagedCache(awkward_pool(wide, 4), llama.config, ["a"])
    llama.set_attn_implementation("paged_attention")
    with pytest.raises(ValueError, match=r"key of layer 0 must be \(rows, 6 heads"):
        forward(llama, cache, [[5, 6]])
    assert cache.pool.num_free_blocks == 4


def test_a_cache_leaves_inference_mode_with_what_it_holds(llama):
    cache = begin(llama, "ab")
    with torch.inference_mode():
        forward(llama, cache, [[5, 6], [7, 8]])
    cache.crop(-1)
    cache.finish(1)
    assert_near(forward(llama, cache, [[9], [0]])[:1], judged(llama, [[5, 9]]))
    cache.reset()


# -- dtypes and surroundings


def test_a_model_that_changes_its_dtype_goes_on_in_the_same_pool():
    model = small_model("Llama")
    cache = begin(model)
    forward(model, cache, [[5, 6, 7]])
    for dtype, token in ((torch.bfloat16, 8), (torch.float16, 9), (torch.float32, 10)):
        logits = forward(model.to(dtype), cache, [[token]])
    right = judged(model, [[5, 6, 7, 8, 9, 10]])
    assert (logits[-1, -1] - right).abs().max() < 0.05 * right.abs().max()
    with pytest.raises(TypeError, match="query must have dtype.*float64|float64"):
        forward(model.double(), cache, [[11]])
    assert cache.pool.seq_lens("a").tolist() == [6]


@pytest.mark.parametrize("around", ["inference", "deterministic", "autocast", "bfloat16", "meta"])
def test_surroundings_change_no_bit(llama, around):
    mask = batch_of([[5] * 70, [6] * 3]).attention_mask.bool()
    masks = {"is_token": mask, "window": 4}
    right = attend(begin(llama, "ab", num_blocks=8), **masks, q_len=70)
    cache = begin(llama, "ab", num_blocks=8)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 70, 12) for heads in (6, 2, 2)]
    try:
        if around == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif around == "bfloat16":
            torch.set_default_dtype(torch.bfloat16)
        elif around == "meta":
            torch.set_default_device("meta")
        with (
            torch.inference_mode(around == "inference"),
            torch.autocast("cpu", torch.bfloat16, around == "autocast"),
        ):
            got = attend(cache, inputs=inputs, **masks)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")
    assert torch.equal(got, right)
