"""What becomes of what transformers gives to an attention: one table, in code and docs."""

import ast
import re
from pathlib import Path

import pytest
import torch
from hf_models import awkward_pool, hf, small_model, transformers

from paged_attention.hf.attention import attention
from paged_attention.hf.keywords import HEEDED, SERVED, WITHOUT_EFFECT
from paged_attention.hf.masks import CausalMask

ROOT = Path(__file__).parents[2]
SOURCES = Path(transformers.__file__).parent
INPUTS = {"query", "key", "value"}
NOT_FALSE_OF = {"use_cache"}  # only models that pass it on mean it; see PUB-29


def known():
    return {*HEEDED, *SERVED, *WITHOUT_EFFECT}


def test_no_keyword_has_two_fates():
    assert len(known()) == len(HEEDED) + len(SERVED) + len(WITHOUT_EFFECT)


def test_the_table_has_every_keyword_that_models_give_to_an_attention():
    given = set()
    for path in SOURCES.glob("models/*/modeling_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("attention_interface", "attn_interface"):
                    given |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert len(given) > 10
    assert given - INPUTS <= known()


def test_the_table_has_every_keyword_that_transformers_says_may_travel_through_a_model():
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils.generic import TransformersKwargs

    travelling = TransformersKwargs.__annotations__ | FlashAttentionKwargs.__annotations__
    assert travelling.keys() <= known()


def test_the_docs_have_the_same_list():
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| keyword \|.*?\n\n", text, re.DOTALL)
    assert (
        set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M)))) == known()
    )


@pytest.fixture(scope="module")
def llama():
    return small_model("Llama")


def attend(model, **options):
    """The first layer's attention, and the cache."""
    cache = hf.PagedCache(awkward_pool(model, 4, 4), model.config, ["a"])
    model.set_attn_implementation("paged_attention")
    query, key, value = (torch.ones(1, heads, 3, 12) for heads in (6, 2, 2))
    key, value = cache.update(key, value, 0)
    module = model.model.layers[0].self_attn
    mask = CausalMask(None, None)
    try:
        return attention(module, query, key, value, mask, scaling=0.3, **options)[0]
    finally:
        assert cache.pool.seq_lens(["a"]).tolist() == [0]  # there are more layers to come


@pytest.mark.parametrize("name", sorted(SERVED.keys() - NOT_FALSE_OF))
def test_a_value_that_is_not_served_is_refused_by_name(llama, name):
    for value in SERVED[name]:
        attend(llama, **{name: value})
    for other in (0.5, torch.ones(2)):
        with pytest.raises(NotImplementedError, match=f"^{name}=.*not served by paged_attention"):
            attend(llama, **{name: other})


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_has_no_effect_changes_no_bit(llama, name, recwarn):
    assert torch.equal(attend(llama, **{name: torch.ones(2)}), attend(llama))
    assert not recwarn.list


def test_a_window_that_is_not_the_masks_is_refused(llama):
    with pytest.raises(NotImplementedError, match="sliding_window=7.*only None"):
        attend(llama, sliding_window=7)
