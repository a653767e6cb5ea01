"""The three ways in which a paged KV cache lies in memory, and what a cache must be.

    "vllm"  key   (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
            value (num_blocks, num_kv_heads, head_size, block_size)
    "HND"   both  (num_blocks, num_kv_heads, block_size, head_size)
    "NHD"   both  (num_blocks, block_size, num_kv_heads, head_size)

vLLM splits a key's lanes into pieces of 16 bytes, so that one GPU thread loads one piece of each
token. HND and NHD are FlashInfer's names for the two plain orders.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, refuse
from .fp8 import FLOAT8S, KV_CACHE_DTYPES

LAYOUTS = ("vllm", "HND", "NHD")


class Geometry(NamedTuple):
    """The sizes of a cache, read from its tensors."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int


def lanes_per_piece(dtype: torch.dtype) -> int:
    """x of the "vllm" layout, which is how many elements 16 bytes hold."""
    return 16 // dtype.itemsize


def check_layout(layout: object) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        refuse("layout", f"one of {LAYOUTS}", repr(layout))


def cache_shapes(
    geometry: Geometry, layout: str, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(key shape, value shape) of a cache of this geometry.

    Raises:  ValueError: layout is unknown, or "vllm" and head_size is not a multiple of x
    """
    check_layout(layout)
    num_blocks, block_size, num_kv_heads, head_size = geometry
    if layout != "vllm":
        inner = (num_kv_heads, block_size) if layout == "HND" else (block_size, num_kv_heads)
        return (num_blocks, *inner, head_size), (num_blocks, *inner, head_size)
    x = lanes_per_piece(dtype)
    if head_size % x:
        rule = f'a multiple of {x} in layout "vllm" for {dtype} (16 bytes), or the layout plain'
        refuse("head_size", rule, head_size)
    value_shape = (num_blocks, num_kv_heads, head_size, block_size)
    return (num_blocks, num_kv_heads, head_size // x, block_size, x), value_shape


def tokens_of(key_cache: Tensor, value_cache: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Both caches as views whose first two dimensions are a token's block and slot.

    Returns: key: (num_blocks, block_size, num_kv_heads, head_size). For "vllm" the lanes stay in
                  their pieces: (num_blocks, block_size, num_kv_heads, head_size/x, x)
             value: (num_blocks, block_size, num_kv_heads, head_size)
    """
    if layout == "NHD":
        return key_cache, value_cache
    if layout == "HND":
        return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    return key_cache.permute(0, 3, 1, 2, 4), value_cache.permute(0, 3, 1, 2)


def check_cache_dtypes(key_cache: Tensor, value_cache: Tensor, kv_cache_dtype: str) -> None:
    """Check that the caches' format is known.

    Float caches and torch's float8 caches describe themselves. uint8 caches hold the format that
    kv_cache_dtype names.
    """
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in KV_CACHE_DTYPES:
        refuse("kv_cache_dtype", f"one of {KV_CACHE_DTYPES}", repr(kv_cache_dtype))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if kv_cache_dtype != "auto" and cache.dtype != torch.uint8:
            refuse(name, f"torch.uint8 with kv_cache_dtype={kv_cache_dtype!r}", cache.dtype)
        if kv_cache_dtype == "auto" and cache.dtype == torch.uint8:
            refuse(f"kv_cache_dtype of a torch.uint8 {name}", "the name of its format", '"auto"')
        if kv_cache_dtype == "auto" and cache.dtype not in FLOATS + FLOAT8S:
            refuse(name, "float32, float16 or bfloat16", cache.dtype, TypeError)
    if key_cache.dtype != value_cache.dtype:
        refuse("value_cache", f"{key_cache.dtype} like key_cache", value_cache.dtype, TypeError)


def resolve_layout(key_cache: Tensor, layout: str | None) -> str:
    """The layout that is meant. None means "vllm" for a 5-D key cache."""
    rank, got = key_cache.dim(), f"shape {tuple(key_cache.shape)}"
    if layout is None and rank == 4:
        rule = '"HND" or "NHD" for a 4-D key_cache, because the two can\'t be told apart'
        refuse("layout", rule, None)
    if layout is None and rank != 5:
        refuse("key_cache", "4-D or 5-D", got)
    layout = "vllm" if layout is None else layout
    check_layout(layout)
    if rank != (5 if layout == "vllm" else 4):
        refuse("key_cache", f"{5 if layout == 'vllm' else 4}-D in layout {layout!r}", got)
    return layout


def cache_geometry(key_cache: Tensor, value_cache: Tensor, layout: str) -> Geometry:
    """The sizes of the caches. Both tensors must have exactly the shapes that follow from them."""
    value_shape = tuple(value_cache.shape)
    if len(value_shape) != 4:
        refuse("value_cache", "4-D", f"shape {value_shape}")
    order = {"vllm": (0, 3, 1, 2), "HND": (0, 2, 1, 3), "NHD": (0, 1, 2, 3)}[layout]
    geometry = Geometry(*(value_shape[dim] for dim in order))
    for name in ("block_size", "num_kv_heads", "head_size"):
        if getattr(geometry, name) < 1:
            refuse("value_cache", f"of a {name} of at least 1 in layout {layout!r}", value_shape)
    key_shape, _ = cache_shapes(geometry, layout, key_cache.dtype)
    if key_cache.shape != key_shape:
        fitting = f"{key_shape} in layout {layout!r} for {key_cache.dtype} and value_cache"
        refuse("key_cache", f"{fitting} {value_shape}", tuple(key_cache.shape))
    return geometry
