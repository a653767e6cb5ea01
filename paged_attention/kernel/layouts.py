"""The three ways a paged KV cache lies in memory, and fetching blocks from each.

    "vllm"  key   (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
            value (num_blocks, num_kv_heads, head_size, block_size)
    "HND"   both  (num_blocks, num_kv_heads, block_size, head_size)
    "NHD"   both  (num_blocks, block_size, num_kv_heads, head_size)

vLLM splits a key's lanes into pieces of 16 bytes so that one GPU thread loads one piece of each
token; HND and NHD are FlashInfer's names for the two plain orders.
"""

from typing import NamedTuple

LAYOUTS = ("vllm", "HND", "NHD")


class Geometry(NamedTuple):
    """The sizes of a cache, read from its tensors."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


def lanes_per_piece(dtype):
    """x of the "vllm" layout: how many elements of dtype 16 bytes hold."""
    return 16 // dtype.itemsize


def cache_shapes(geometry, layout, dtype):
    """(key shape, value shape) of a cache of this geometry.

    Raises:  ValueError: layout is unknown, or "vllm" and head_size is not a multiple of x
    """
    num_blocks, block_size, num_kv_heads, head_size = geometry
    if layout == "HND":
        shape = (num_blocks, num_kv_heads, block_size, head_size)
        return shape, shape
    if layout == "NHD":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return shape, shape
    if layout != "vllm":
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    x = lanes_per_piece(dtype)
    if head_size % x:
        raise ValueError(
            f'layout "vllm" needs a head_size that is a multiple of {x} for {dtype} '
            f"(16 bytes), got head_size {head_size}; use HND or NHD"
        )
    return (
        (num_blocks, num_kv_heads, head_size // x, block_size, x),
        (num_blocks, num_kv_heads, head_size, block_size),
    )


def tokens_of(key_cache, value_cache, layout):
    """Both caches with a token's position in front, as views.

    Returns: key: (num_blocks, block_size, num_kv_heads, head_size), or for "vllm" the lanes in
                  their pieces, (num_blocks, block_size, num_kv_heads, head_size/x, x)
             value: (num_blocks, block_size, num_kv_heads, head_size)
    """
    if layout == "NHD":
        return key_cache, value_cache
    if layout == "HND":
        return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    return key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)


def pack(key, value, layout):
    """Blocks of plain keys and values, laid out as a cache.

    Args:    key, value: (num_blocks, block_size, num_kv_heads, head_size), same dtype
             layout: "vllm", "HND" or "NHD"
    Returns: (key_cache, value_cache), contiguous, freshly allocated; `unpack` gives the same
             bits back
    Raises:  ValueError: as cache_shapes
    """
    geometry = Geometry(*key.shape)
    key_shape, value_shape = cache_shapes(geometry, layout, key.dtype)
    caches = key.new_empty(key_shape), value.new_empty(value_shape)
    key_tokens, value_tokens = tokens_of(*caches, layout)
    key_tokens.copy_(key.reshape(key_tokens.shape))
    value_tokens.copy_(value)
    return caches


def unpack(key_cache, value_cache, layout):
    """The inverse of `pack`: (key, value), each (num_blocks, block_size, num_kv_heads, head_size),
    copies or views as the layout allows."""
    key, value = tokens_of(key_cache, value_cache, layout)
    return key.flatten(3), value
