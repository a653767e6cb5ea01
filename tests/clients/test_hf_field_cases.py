"""Faults that users of other caches for transformers reported, as small inputs.

Each test is named after its case. Before it runs, two strangers have left their keys in the pool.
"""

import copy
import warnings

import pytest
import torch
from hf_models import CACHE, awkward_pool, batch_of, greedy, hf, small_model, transformers

from paged_attention import OutOfBlocks

IS_OLD = CACHE != "cache"  # transformers 4 tells its attention less
STRANGERS = [list(range(60, 68)), list(range(30, 38))]


@pytest.fixture(scope="module")
def llama():
    return small_model("Llama")


def begin(model, rows="a", num_blocks=40, **more):
    """A cache over blocks of 4, in which others have left what they wrote."""
    pool = awkward_pool(model, num_blocks, 4, **more)
    model.set_attn_implementation("paged_attention")
    for tokens in STRANGERS:
        forward(model, hf.PagedCache(pool, model.config, ["stranger"]), [tokens])
        pool.free("stranger")
    return hf.PagedCache(pool, model.config, rows)


@torch.no_grad()
def forward(model, cache, ids, **more):
    return model(torch.tensor(ids), **more, **{CACHE: cache}).logits


def generate(model, cache, ids, num_tokens, **more):
    """The new tokens, of one row each."""
    more = {"max_new_tokens": num_tokens, "do_sample": False, CACHE: cache, **more}
    return model.generate(torch.tensor(ids), **more)[:, len(ids[0]) :].tolist()


def judged(model, ids, **more):
    """(rows, vocab_size), the last logits in float64, eager, without a cache."""
    judge = copy.deepcopy(model).double()
    judge.set_attn_implementation("eager")
    if hasattr(judge, "set_experts_implementation"):
        judge.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        return judge(torch.tensor(ids), use_cache=False, **more).logits[:, -1]


def assert_near(logits, right, tolerance=1e-4):
    right = torch.as_tensor(right, dtype=logits.dtype)
    assert (logits[-1, -1, : right.shape[-1]] - right).abs().max() < tolerance


class Stop(BaseException):
    """What a forward pass is broken off by."""


def broken_off(model, module, cache, ids, error=Stop, **more):
    """Run a forward pass that breaks off once a module has run."""

    def stop(*args):
        raise error

    hook = module.register_forward_hook(stop)
    try:
        with pytest.raises(error):
            forward(model, cache, ids, **more)
    finally:
        hook.remove()


# -- PUB-27


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_pub_27_a_step_that_was_aborted_can_be_tried_again(llama, error):
    ids, right = [[8, 9, 10, 11, 12]], [0.1588, -0.1947, -0.1058]
    for module in (llama.model.layers[1].mlp, llama.model.layers[0].self_attn.v_proj):
        cache = begin(llama)
        broken_off(llama, module, cache, ids, error)
        assert cache.pool.seq_lens("a").tolist() == [0] and cache.get_seq_length() == 0
        assert_near(forward(llama, cache, ids), right)
        cache = begin(llama)
        broken_off(llama, module, cache, ids, error)
        assert generate(llama, cache, ids, 4) == [[69, 85, 31, 4]]
        assert cache.pool.seq_lens("a").tolist() == [8]


def test_pub_27_in_the_middle_of_a_text_and_with_padding(llama):
    cache = begin(llama, "ab")
    batch = batch_of([[5, 6, 7], [8, 9, 10, 11, 12]])
    forward(llama, cache, batch.input_ids.tolist(), attention_mask=batch.attention_mask)
    lens, free = cache.pool.seq_lens("ab").tolist(), cache.pool.num_free_blocks
    mask = torch.tensor([[0, 0, *[1] * 8], [1] * 10])
    more = {"attention_mask": mask, "position_ids": torch.arange(5, 10)[None]}
    step = [list(range(40, 45)), list(range(50, 55))]
    for _ in range(3):
        broken_off(llama, llama.model.layers[1], cache, step, **more)
        assert cache.pool.seq_lens("ab").tolist() == lens == [3, 5]
    assert cache.pool.num_free_blocks < free
    cache._roll_back()  # as whatever touches the cache next does
    assert cache.pool.num_free_blocks == free
    assert_near(forward(llama, cache, step, **more), judged(llama, [[*range(8, 13), *step[1]]]))


def test_pub_27_what_an_aborted_step_wrote_is_read_by_nobody_else(llama):
    """A fork of the row, and a new cache over the same row."""
    cache, ids = begin(llama), [[5, 6, 7, 8, 9, 10]]
    forward(llama, cache, ids)
    broken_off(llama, llama.model.layers[0], cache, [[70, 71, 72]])
    cache.pool.fork("a", "fork")
    assert cache.pool.seq_lens(["a", "fork"]).tolist() == [6, 6]
    right = judged(llama, [[*ids[0], 20]])
    for row in ("fork", "a"):
        other = hf.PagedCache(cache.pool, llama.config, [row])
        assert_near(forward(llama, other, [[20]]), right)
    with pytest.raises(ValueError, match="seq_ids.*6.*7.*somebody else"):
        forward(llama, cache, [[20]])


def test_pub_27_an_aborted_step_of_beams_and_of_a_full_pool(llama):
    cache = begin(llama, "ab", num_blocks=4)
    forward(llama, cache, [[5, 6, 7, 8], [15, 16, 17, 18]])
    broken_off(llama, llama.model.layers[0], cache, [[9], [19]])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.pool.num_free_blocks == 3
    assert_near(forward(llama, cache, [[9], [19]]), judged(llama, [[15, 16, 17, 18, 19]]))
    with pytest.raises(OutOfBlocks):
        forward(llama, cache, [[1] * 8] * 2)
    assert cache.pool.seq_lens("ab").tolist() == [5, 5]


def test_pub_27_layers_of_another_kind_can_not_go_back_and_say_so():
    if not hasattr(transformers, "Qwen3_5TextConfig"):
        pytest.skip("this transformers keeps such layers in caches of their own")
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    model = small_model("Qwen3_5Text", **kinds, **sizes)
    ids = [[5, 6, 7, 8]]
    right = judged(model, ids)
    for i in (0, 1, 3):  # before, in and after the first layer that attends
        cache = begin(model)
        broken_off(model, model.model.layers[i].mlp, cache, ids)
        if i < 3:  # the last of them has attended
            with pytest.raises(RuntimeError, match="broke off.*reset"):
                forward(model, cache, ids)
        cache.reset()
        assert_near(forward(model, cache, ids), right)


# -- What is passed is heeded, or refused by name


def test_pub_28_keys_that_are_not_those_of_the_cache_are_refused():
    """DiffLlama's attention runs twice in a layer, on halves of the values."""
    if IS_OLD:
        with pytest.raises(NotImplementedError, match="an attention of its own"):
            hf.kv_pool(transformers.DiffLlamaConfig(), 4)
        return
    model = small_model("DiffLlama", head_dim=None)
    cache = hf.PagedCache(awkward_pool(model, 8, 4), model.config, "a")
    model.set_attn_implementation("paged_attention")
    with pytest.raises(ValueError, match="key and value as a PagedCache returned them"):
        forward(model, cache, [[5, 6, 7, 8, 9]])
    assert cache.pool.num_free_blocks == 8


@pytest.mark.parametrize("prompts", [[[5, 6, 7, 8]], [[5, 6, 7], [5, 6, 7, 8]]])
def test_pub_29_use_cache_false_is_refused_by_name(llama, prompts):
    cache, batch = begin(llama, range(len(prompts))), batch_of(prompts)
    with pytest.raises((NotImplementedError, ValueError), match="use_cache=False"):
        greedy(llama, batch, 5, "paged_attention", cache, use_cache=False)
    if not IS_OLD:  # its layers are never told, and the second step gives it away
        assert cache.pool.num_free_blocks == 40


def test_pub_29_a_family_whose_layers_always_say_so_is_served():
    if IS_OLD:
        pytest.skip("there Llama is of these")
    model = small_model("Olmo3", sliding_window=5)
    cache, ids = begin(model), [[5, 6, 7, 8]]
    assert len(generate(model, cache, ids, 3)[0]) == 3
    with pytest.raises(ValueError, match="position_ids.*use_cache=False"):
        generate(model, begin(model), ids, 3, use_cache=False)


def test_pub_30_gradients_are_refused_before_anything_is_written(llama):
    cache, ids = begin(llama), torch.tensor([[5, 6, 7, 8, 9, 10]])
    llama.train()
    with pytest.raises(ValueError, match="query must be detached.*no_grad.*no backward"):
        llama(ids, labels=ids, **{CACHE: cache}).loss.backward()
    llama.eval()
    assert cache.pool.num_free_blocks == 40
    assert_near(forward(llama, cache, ids.tolist()), judged(llama, ids.tolist()))


@pytest.mark.parametrize(
    "positions",
    [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 2, 3, 4, 5], [*range(3, 10)]],
)
def test_pub_33_position_ids_that_do_not_go_on_are_refused(llama, positions):
    cache, ids = begin(llama), [list(range(5, 12))]
    with pytest.raises(ValueError, match=r"position_ids\[0\] must be 0 and on"):
        forward(llama, cache, ids, position_ids=torch.tensor([positions]))
    assert cache.pool.num_free_blocks == 40
    forward(llama, cache, ids)
    for wrong in (0, 6, 8):
        with pytest.raises(ValueError, match=r"position_ids\[0\] must be 7 and on"):
            forward(llama, cache, [[20]], position_ids=torch.tensor([[wrong]]))
    assert_near(forward(llama, cache, [[20]]), judged(llama, [[*ids[0], 20]]))


def test_pub_38_output_attentions_is_refused():
    llama = small_model("Llama")  # transformers 4 leaves a mark on it
    cache = begin(llama)
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        forward(llama, cache, [[5, 6, 7]], output_attentions=True)
    assert cache.pool.num_free_blocks == 40


# -- Which models are served


SHARING = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(
    "more",
    [
        {"num_kv_shared_layers": 1},
        {"global_head_dim": 24},
        {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ],
)
def test_pub_34_layers_that_share_keys_or_have_heads_of_their_own(more):
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    model = small_model("Gemma4Text", sliding_window=4, layer_types=SHARING, **sizes, **more)
    prompts = [[5, 6, 7, 8, 9], list(range(10, 80)), [3]]
    right = greedy(model, batch_of(prompts), 6, "eager")
    cache = hf.PagedCache(awkward_pool(model, 40, 4), model.config, "abc")
    got = greedy(model, batch_of(prompts), 6, "paged_attention", cache)
    assert torch.equal(got[0], right[0]) and (got[1] - right[1]).abs().max() < 1e-4
    assert_near(forward(model, begin(model), [prompts[1]]), judged(model, [prompts[1]]))


REFUSED = {
    "DeepseekV3": ({}, "MLA"),
    "DeepseekV2": ({}, "MLA"),
    "Glm4MoeLite": ({}, "MLA"),
    "MiniCPM3": ({}, "MLA"),
    "FalconH1": ({}, "layer 0"),
    "InklingText": ({}, "layer 0"),
    "Llama4Text": ({"attention_chunk_size": 4}, "in chunks"),
    "Bloom": ({}, "an attention of its own"),
    "Mamba": ({}, "no attention"),
    "Blt": ({}, "how many layers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_pub_35_36_41_a_model_that_is_not_served_is_refused_by_what_it_is(kind, llama):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    more, why = REFUSED[kind]
    config = getattr(transformers, f"{kind}Config")(**more)
    named = f"^'{config.get_text_config().model_type}' is not served by paged_attention: .*{why}"
    with pytest.raises(NotImplementedError, match=named):
        hf.kv_pool(config, 4)
    with pytest.raises(NotImplementedError, match=named):
        hf.PagedCache(hf.kv_pool(llama.config, 4), config, ["a"])


def test_pub_41_phimoes_window_is_its_masks():
    if IS_OLD:
        with pytest.raises(NotImplementedError, match="an attention of its own"):
            hf.kv_pool(transformers.PhimoeConfig(), 4)
        return
    model = small_model("Phimoe", sliding_window=5, num_local_experts=4)
    ids = [[5 + 3 * i for i in range(20)]]
    assert_near(forward(model, begin(model), ids), judged(model, ids))
    whole = small_model("Phimoe", num_local_experts=4)
    assert (judged(model, ids) - judged(whole, ids)).abs().max() > 1e-2


# -- Surroundings


def test_pub_32_a_compiled_model_is_right(llama):
    """By graph breaks around update, mask and attention."""
    batch = batch_of([[5, 17, 3], [8, 9, 10, 11]])
    right = greedy(llama, batch, 4, "eager")
    model = small_model("Llama")
    cache = begin(model, "ab")
    model.forward = torch.compile(model.forward, backend="eager")
    got = greedy(model, batch, 4, "paged_attention", cache)
    torch.compiler.reset()
    assert torch.equal(got[0], right[0]) and (got[1] - right[1]).abs().max() < 1e-5
    assert cache.pool.seq_lens("ab").tolist() == [6, 7]


def test_pub_37_crop_takes_back_the_last_columns(llama):
    for back in (-2, 3):  # as transformers 5 and 4 have it
        cache = begin(llama)
        forward(llama, cache, [[5, 6, 7, 8, 9]])
        cache.crop(back)
        assert cache.pool.seq_lens("a").tolist() == [3] and cache.get_seq_length() == 3
        assert cache.pool.num_free_blocks == 39
        assert_near(forward(llama, cache, [[20]]), [-0.0901, -0.3837, 0.1549])
        with pytest.raises(ValueError, match="tokens_to_remove.*4 columns, got 5"):
            cache.crop(-5)


def test_pub_37_crop_of_a_ragged_batch_and_of_a_shared_prefix(llama):
    cache, batch = begin(llama, "ab"), batch_of([[5], [8, 9, 10, 11, 12]])
    forward(llama, cache, batch.input_ids.tolist(), attention_mask=batch.attention_mask)
    cache.pool.fork("b", "kept")
    cache.crop(-3)
    assert cache.pool.seq_lens(["a", "b", "kept"]).tolist() == [0, 2, 5]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[0, 1], [2, 3]])
    more = {"attention_mask": mask, "position_ids": positions}
    logits = forward(llama, cache, [[20, 21], [22, 23]], **more)
    assert_near(logits[:1], judged(llama, [[20, 21]]))
    assert_near(logits, judged(llama, [[8, 9, 22, 23]]))
    kept = hf.PagedCache(cache.pool, llama.config, ["kept"])
    assert_near(forward(llama, kept, [[30]]), judged(llama, [[8, 9, 10, 11, 12, 30]]))


@pytest.mark.parametrize("assisted_by", ["prompt", "model"])
def test_pub_37_assisted_generation_says_what_plain_generation_says(llama, assisted_by):
    ids = [[5, 6, 7, 8, 9, 5, 6, 7]]
    more = {"prompt_lookup_num_tokens": 3}
    if assisted_by == "model":
        more = {"assistant_model": small_model("Llama", seed=5, num_hidden_layers=1)}
    right = generate(llama, begin(llama), ids, 30)
    cache = begin(llama)
    cropped = []
    crop = cache.crop
    cache.crop = lambda columns: (cropped.append(columns), crop(columns))
    assert generate(llama, cache, ids, 30, **more) == right
    assert any(cropped)  # or nothing was rolled back
    assert cache.pool.seq_lens("a").tolist() == [cache.get_seq_length()]


@pytest.mark.parametrize("device", ["meta"])
def test_pub_39_another_default_device_changes_no_bit(llama, device):
    batch = batch_of([[5, 6], list(range(7, 90))])
    ids, mask = batch.input_ids.tolist(), {"attention_mask": batch.attention_mask}
    ids = torch.tensor(ids)
    cache = begin(llama, "ab")
    with torch.no_grad():
        right = llama(ids, **mask, **{CACHE: begin(llama, "ab")}).logits
        torch.set_default_device(device)
        try:
            got = llama(ids, **mask, **{CACHE: cache}).logits
            cache.crop(-1)
            cache.reorder_cache(torch.tensor([0, 1], device="cpu"))
            cache.reset()
        finally:
            torch.set_default_device("cpu")
    assert torch.equal(got, right)


def test_pub_40_a_pool_made_in_inference_mode(llama):
    with torch.inference_mode():
        cache = begin(llama)
        forward(llama, cache, [[5, 6, 7]])
    assert_near(forward(llama, cache, [[20]]), judged(llama, [[5, 6, 7, 20]]))


def test_a_keyword_that_nobody_knows_is_named_in_one_warning(llama):
    cache = begin(llama)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for token in (5, 6):
            forward(llama, cache, [[token]], wibble=3, wobble=None)
    assert [str(t.message) for t in told if "keyword" in str(t.message)] == [
        "paged_attention doesn't know the keyword 'wibble' and leaves it out"
    ]
