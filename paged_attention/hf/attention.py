"""The attention that `paged_attention.hf` registers with transformers.

Prompts and new tokens are treated alike. A layer writes their keys and values to the pool, and
then all their queries read what the pool holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attention.hf.keywords import NAME, check_keywords
from paged_attention.hf.masks import CausalMask, check_mask
from paged_attention.kernel.checks import refuse
from paged_attention.kernel.transforms import refuse_gradients, uncompiled


@uncompiled
def attention(
    module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Store a layer's new keys and values in the pool, then attend to what it holds.

    Args:    query: (rows, num_heads, q_len, head_size)
             key, value: (rows, num_kv_heads, columns, head_size), as PagedLayer.update gave them
             s_aux: sinks
             others: what transformers passes besides, see `keywords`
    Returns: (rows, q_len, num_heads, head_size), 0 where a query is padding, and None instead of
             the weights
    Raises:  NotImplementedError, ValueError: something that isn't served. Nothing is written
    """
    layer = getattr(key, "paged_layer", None)
    if layer is None or getattr(value, "paged_layer", None) is not layer:
        raise ValueError(
            f"{NAME} needs key and value as a PagedCache returned them. Either the model's cache "
            "is no PagedCache, or its attention makes other keys or values of what is cached"
        )
    cache, pool = layer.cache, layer.cache.pool
    check_keywords(others, module, cache.unknown_keywords)
    mask = check_mask(attention_mask, sliding_window)
    refuse_gradients({"query": query, "key": key, "value": value})
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    (rows, q_len, num_heads, _), columns = query.shape, key.shape[1]
    if q_len != (mask.last or columns):
        refuse("query", f"as long as key, {columns} columns", q_len)
    geometry = pool.geometries[layer.number]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != (rows, columns, *geometry[2:]):
            rule = f"(rows, {geometry.num_kv_heads} heads, q_len, {geometry.head_size} lanes)"
            refuse(f"{name} of layer {layer.number}", rule, tuple(tensor.transpose(1, 2).shape))
    this_pass = cache.forward_pass(rows, columns, mask.is_token, position_ids)
    pieces = this_pass.pieces(num_heads, q_len, mask.window, geometry)
    if layer.number not in this_pass.written:  # or a later layer shares this one's keys
        slots = this_pass.slots.flatten()
        pool.write(key.flatten(0, 1), value.flatten(0, 1), slots, layer.number)
    caches = pool.key_cache(layer.number), pool.value_cache(layer.number)
    out = query.new_empty(query.shape)
    for some, lens, plan in pieces:
        options = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "out": out[:, some]}
        plan.run(query[:, some], *caches, this_pass.tables, lens, **options)
    cache.layer_is_done(layer.number)
    return out, None
