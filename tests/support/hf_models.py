"""For the tests of hf.py: models, pools as awkward as can be, and greedy runs to compare."""

import random
from inspect import signature
from typing import NamedTuple

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.57")
hf = pytest.importorskip("paged_attention.hf")

NAN = float("nan")
CACHE = "cache"  # what forward and generate call it; older versions don't
if CACHE not in signature(transformers.LlamaForCausalLM.forward).parameters:
    CACHE = "past_key_values"

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def small_model(kind, seed=0, **more):
    """A model of random weights, large enough for a softmax with peaks; float32, eager."""
    config = getattr(transformers, f"{kind}Config")(**SMALL | more)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(12)
    return model


def awkward_pool(model, num_blocks, block_size=16, **more):
    """Blocks are handed out in a random order; every slot holds NaN."""
    pool = hf.kv_pool(model.config, num_blocks, block_size, **more)
    order = list(range(num_blocks))
    pool.extend_all(order, [block_size] * num_blocks)
    random.Random(3).shuffle(order)
    for seq_id in order:
        pool.free(seq_id)
    for cache in (pool.key_cache, pool.value_cache):
        for layer in range(len(pool.geometries)):
            cache(layer).fill_(NAN)
    return pool


class Batch(NamedTuple):
    """Prompts side by side, padded on the left."""

    input_ids: torch.Tensor  # (rows, columns)
    attention_mask: torch.Tensor


def batch_of(prompts):
    """Args: prompts: lists of token ids"""
    columns = max(map(len, prompts))
    ids = [[0] * (columns - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (columns - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return Batch(torch.tensor(ids), torch.tensor(mask))


def greedy(model, batch, num_tokens, implementation, cache=None, **more):
    """Generate num_tokens greedily.

    Returns: tokens: (rows, num_tokens);  logits: (rows, num_tokens, vocab_size), each token's
    """
    model.set_attn_implementation(implementation)
    if cache is not None:
        more[CACHE] = cache
    done = model.generate(
        **batch._asdict(),
        **{"min_new_tokens": num_tokens, **more},
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return done.sequences[:, batch.input_ids.shape[1] :], torch.stack(done.logits, dim=1)
