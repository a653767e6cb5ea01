"""Kinds of models, by what each asks of the kernel: logits are those of eager attention."""

import pytest
from hf_models import CACHE, awkward_pool, batch_of, greedy, hf, small_model, transformers

from paged_attention import plan_decode
from paged_attention.hf import forward_pass

HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = {
    # No option at all, on a grouping that is no power of two.
    "Llama": {},
    # 24 query heads on 4 KV heads of 256 lanes; every other layer has a state of another kind.
    "Qwen3_5Text": {
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 4,
        "layer_types": HYBRID,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    # A window in every layer.
    "Mistral": {"sliding_window": 5},
    # A window in some layers, a scale that isn't head_size ** -0.5, a soft cap that bites.
    "Gemma2": {
        "sliding_window": 5,
        "layer_types": SLIDING,
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
    },
    # A window in some layers, sinks in all.
    "GptOss": {"sliding_window": 5, "layer_types": SLIDING, **MOE},
}
# Shorter than the window; longer than a piece of a prompt; neither.
LENGTHS = [3, 150, 11]
PROMPTS = [[3 + (7 * i * i + 5 * n) % 90 for i in range(n)] for n in LENGTHS]
NEW = 12


def model_of(kind):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return small_model(kind, **FAMILIES[kind])


def difference(kind):
    """(most that a logit is off, whether the tokens are the same)."""
    model = model_of(kind)
    tokens, logits = greedy(model, batch_of(PROMPTS), NEW, "eager")
    pool = awkward_pool(model, 160, block_size=4)
    cache = hf.PagedCache(pool, model.config, "abc")
    got_tokens, got = greedy(model, batch_of(PROMPTS), NEW, "paged_attention", cache)
    return (got - logits).abs().max().item(), got_tokens.equal(tokens)


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_of_a_ragged_batch_are_those_of_eager_attention(kind):
    error, same = difference(kind)
    assert error < 1e-4 and same


@pytest.mark.parametrize(
    "kind, option",
    [
        ("Mistral", "window"),
        ("Gemma2", "window"),
        ("Gemma2", "softcap"),
        ("Gemma2", "scale"),
        ("GptOss", "window"),
        ("GptOss", "sinks"),
    ],
)
def test_a_lost_option_would_be_seen(kind, option, monkeypatch):
    """Or the test above proved little: these models need what they ask for."""

    class Forgetful:
        def __init__(self, **planned):
            self.plan = plan_decode(**planned | ({"window": None} if option == "window" else {}))

        def run(self, *tensors, **options):
            options.pop(option, None)
            return self.plan.run(*tensors, **options)

    monkeypatch.setattr(forward_pass, "plan_decode", Forgetful)
    assert difference(kind)[0] > 1e-2


def test_a_state_that_the_pool_does_not_hold_can_not_be_gone_on_from():
    model = model_of("Qwen3_5Text")
    pool = awkward_pool(model, 8)
    pool.extend("prompt", 3)
    pool.fork("prompt", "heir")
    with pytest.raises(ValueError, match="seq_ids.*heir"):
        hf.PagedCache(pool, model.config, ["heir"])


def test_beams_of_a_hybrid_model_take_their_other_states_along():
    model, batch = model_of("Qwen3_5Text"), batch_of([PROMPTS[0]])
    more = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 3, "do_sample": False}
    right = model.generate(**batch._asdict(), **more)
    cache = hf.PagedCache(awkward_pool(model, 20, 4), model.config, "abc")
    model.set_attn_implementation("paged_attention")
    assert model.generate(**batch._asdict(), **more, **{CACHE: cache}).equal(right)
