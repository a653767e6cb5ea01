"""A model of transformers that writes to a PagedKVCache and attends through the kernel.

    from paged_attention.hf import PagedCache, kv_pool, smollm2

    model, tokenizer = smollm2.load()[0], smollm2.tokenizer()  # or a Llama, Qwen, Gemma, ...
    model.set_attn_implementation("paged_attention")
    texts = ["The whale", "Call me Ishmael. Some years ago"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")

    pool = kv_pool(model.config, num_blocks=64)
    cache = PagedCache(pool, model.config, ["a", "b"])  # a row is a sequence of the pool
    ids = model.generate(**inputs, cache=cache, max_new_tokens=20, do_sample=False)
    print(tokenizer.batch_decode(ids, skip_special_tokens=True))

A transformers whose models don't know `cache` takes `past_key_values=cache`. Importing PagedCache
or kv_pool registers the attention "paged_attention", and its mask, with transformers.

Served are decoders with causal attention, over all keys or over a window, with the model's own
scale, softcap and sinks. Padding is on the left. Anything else is an error that names it. There
are no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_attention.hf.cache import PagedCache, kv_pool

__all__ = ["PagedCache", "kv_pool"]


def __getattr__(name: str) -> object:
    """Import transformers only now, so that smollm2 can tell whether it is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paged_attention.hf import cache

    return getattr(cache, name)
