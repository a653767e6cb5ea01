"""SmolLM2-135M-Instruct reads Moby-Dick and goes on, word for word, through our cache.

Equal tokens alone would prove little (bf16 has the same): logits must agree too. `make test-model`
runs `whole_model.py`, which is this with longer texts.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import awkward_pool, batch_of, greedy, hf, smollm2

NPZ = Path(__file__).parents[1] / "notebooks" / "data" / "smollm2.npz"
LENGTHS = [5, 130]
NEW = 6
TOLERANCE = 2e-3  # 4e-5 is what it is


@pytest.fixture(scope="module")
def model():
    return smollm2()


@pytest.fixture(scope="module")
def prompts(request):
    with np.load(NPZ) as file:
        text = file["token_ids"].tolist()
    return [text[:n] for n in request.module.LENGTHS]


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
