"""vLLM's reshape_and_cache: new keys and values into their slots of the paged caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_attention.kernel.checks import INTS, refuse, require_floating, require_tensor
from paged_attention.kernel.fp8 import element_dtype
from paged_attention.kernel.layouts import Geometry, cache_geometry, check_cache_dtypes, tokens_of
from paged_attention.vllm.scales import cache_options


@torch.no_grad()
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Store tokens in vLLM's caches, in place.

    Args:    key, value: (num_tokens, num_kv_heads, head_size), floating
             key_cache: (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
             value_cache: (num_blocks, num_kv_heads, head_size, block_size)
             slot_mapping: (num_slots,), int32/int64, block id * block_size + offset. A negative
                   slot is skipped, and so are the tokens beyond num_slots, which are padding.
                   Of several tokens for one slot the last one is stored
             kv_cache_dtype: None or "auto" for caches that describe themselves. Tokens are
                   converted to their dtype, and the scales are ignored, as vLLM ignores them.
                   "fp8", "fp8_e4m3" or "fp8_e5m2" for caches of uint8
             k_scale, v_scale: floats, or tensors of one element or (num_kv_heads,), finite and
                   not 0. fp8 caches store key / k_scale. What is too large for fp8 becomes its
                   largest number
    Raises:  TypeError, ValueError: the argument, its value, and what it should be. Nothing is
                   written. A slot beyond the pool, and a tensor's scale that is 0 or not finite,
                   are found on a CPU only, because elsewhere looking would cost a
                   synchronisation
    Source:  vLLM vllm/_custom_ops.py, reshape_and_cache; csrc/cache_kernels.cu
    Example: three tokens into block 1, and the second one is skipped.
        >>> key_cache, value_cache = torch.zeros(2, 1, 2, 16, 4), torch.zeros(2, 1, 8, 16)
        >>> tokens, slots = torch.ones(3, 1, 8), torch.tensor([16, -1, 18])
        >>> reshape_and_cache(tokens, tokens, key_cache, value_cache, slots)
        >>> value_cache[1, 0, 0, :4]
        tensor([1., 0., 1., 0.])
    """
    kv_cache_dtype, k_scale, v_scale = cache_options(kv_cache_dtype, k_scale, v_scale)
    check_cache_dtypes(key_cache, value_cache, kv_cache_dtype)
    geometry = cache_geometry(key_cache, value_cache, "vllm")
    _check_tokens(key, value, slot_mapping, key_cache.device, geometry)
    num_slots = len(slot_mapping)
    if not num_slots or not geometry.num_blocks:
        return
    # All this reads nothing back to the host. A token whose slot is skipped writes the same as the
    # first token that is kept. If none is, it writes what slot 0 holds already.
    kept = slot_mapping >= 0
    tokens = torch.arange(num_slots, device=kept.device)
    tokens = torch.where(kept, tokens, kept.int().argmax())
    tokens = _last_of_each_slot(slot_mapping.long().clamp(min=-1))[tokens]
    slots = slot_mapping[tokens].long().clamp(min=0)
    places = slots // geometry.block_size, slots % geometry.block_size
    dtype, scales = element_dtype(key_cache.dtype, kv_cache_dtype), (None, None)
    if dtype.itemsize == 1:  # fp8, whose bytes are moved as bytes
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scales = _divisor("k_scale", k_scale, key), _divisor("v_scale", v_scale, key)
    caches = tokens_of(key_cache, value_cache, "vllm")  # each (num_blocks, block_size, ...)
    for cache, new, scale in zip(caches, (key, value), scales):
        new = new[tokens]
        new = new.to(cache.dtype) if scale is None else _fp8_bytes(new, scale, dtype)
        new = new.reshape(num_slots, *cache.shape[2:])
        any_kept = kept.any().view(*[1] * new.dim())
        cache.index_put_(places, torch.where(any_kept, new, cache[places]))


def with_fp8(native: Callable) -> Callable:
    """A port's reshape_and_cache, with ours for caches of one byte an element."""

    @functools.wraps(native)
    def write(*args: Any, **kwargs: Any) -> None:
        key_cache = args[2] if len(args) > 2 else kwargs.get("key_cache")
        is_fp8 = isinstance(key_cache, Tensor) and key_cache.element_size() == 1
        (reshape_and_cache if is_fp8 else native)(*args, **kwargs)

    return write


def _last_of_each_slot(slots: Tensor) -> Tensor:
    """Of each token the last one with the same slot, (num_slots,), int64.

    Whoever writes to a slot then writes the same, because an indexed copy doesn't say which of
    several writers is the last.
    """
    ordered, tokens = slots.sort(stable=True)
    ends = torch.searchsorted(ordered, slots, right=True)
    return tokens[ends - 1]


def _divisor(name: str, scale: float | Tensor, key: Tensor) -> float | Tensor:
    """A scale as a float, or as (1 or num_kv_heads, 1), float32."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1 and scale.shape != key.shape[1:2]:
            rule = f"one element or of shape ({key.shape[1]},), one per KV head"
            refuse(name, rule, f"shape {tuple(scale.shape)}")
        return scale.to(key.device, torch.float32).reshape(-1, 1)
    return float(scale)


def _fp8_bytes(tensor: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """tensor / scale in a float8 dtype, as uint8. What is too large becomes the largest number."""
    largest = torch.finfo(dtype).max
    # Into bytes, because PyTorch 2.1 can't allocate a float8 tensor in deterministic mode.
    result = torch.empty_like(tensor, dtype=torch.uint8)
    result.view(dtype).copy_((tensor.float() / scale).clamp(-largest, largest))
    return result


def _check_tokens(
    key: Tensor, value: Tensor, slot_mapping: Tensor, device: torch.device, geometry: Geometry
) -> None:
    """Check the tokens and their slots against caches of this geometry on this device."""
    for name, tensor in (("key", key), ("value", value)):
        require_floating(name, tensor)
        shape = (*key.shape[:1], geometry.num_kv_heads, geometry.head_size)
        require_tensor(name, tensor, shape=shape, device=device, like="key and the caches")
    require_tensor("slot_mapping", slot_mapping, INTS, device=device, like="the caches")
    if slot_mapping.dim() != 1 or len(slot_mapping) > len(key):
        rule = f"(num_slots,), for {len(key)} tokens at most"
        refuse("slot_mapping", rule, tuple(slot_mapping.shape))
    num_slots = geometry.num_blocks * geometry.block_size
    if slot_mapping.is_cpu and len(slot_mapping) and slot_mapping.max() >= num_slots:
        rule = f"below {num_slots}, the slots of the pool"
        refuse("slot_mapping", rule, int(slot_mapping.max()))
