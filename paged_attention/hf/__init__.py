"""A client of `transformers`: a model writes to a PagedKVCache and attends through the kernel.

    from paged_attention.hf import PagedCache, kv_pool, smollm2

    model, tokenizer = smollm2.load()[0], smollm2.tokenizer()  # or a Llama, Qwen, Gemma, ...
    model.set_attn_implementation("paged_attention")
    texts = ["The whale", "Call me Ishmael. Some years ago"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")

    pool = kv_pool(model.config, num_blocks=64)
    cache = PagedCache(pool, model.config, ["a", "b"])  # a row is a sequence of the pool
    ids = model.generate(**inputs, cache=cache, max_new_tokens=20, do_sample=False)
    print(tokenizer.batch_decode(ids, skip_special_tokens=True))

(`past_key_values=cache` for a transformers that doesn't know `cache`.) Importing this module
registers "paged_attention" with transformers: the attention, and its mask.
"""

try:
    from paged_attention.hf.cache import PagedCache, PagedLayer, kv_pool
except ModuleNotFoundError as error:  # `smollm2` can still be asked whether the extra is there
    if error.name != "transformers":
        raise

__all__ = ["PagedCache", "PagedLayer", "kv_pool"]
