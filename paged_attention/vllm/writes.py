"""vLLM's reshape_and_cache: new keys and values into their slots of the paged caches."""

from numbers import Real

import torch

from paged_attention.kernel.checks import INTS
from paged_attention.kernel.fp8 import element_dtype
from paged_attention.kernel.layouts import cache_geometry, check_cache_dtypes, tokens_of
from paged_attention.vllm.scales import cache_options


@torch.no_grad()
def reshape_and_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    kv_cache_dtype=None,
    k_scale=None,
    v_scale=None,
):
    """Store tokens in vLLM's caches, in place.

    Args:    key, value: (num_tokens, num_kv_heads, head_size), floating
             key_cache: (num_blocks, num_kv_heads, head_size/x, block_size, x), x = 16 / itemsize
             value_cache: (num_blocks, num_kv_heads, head_size, block_size)
             slot_mapping: (num_slots,), int32/int64, block id * block_size + offset; a negative
                   slot is skipped. Tokens beyond num_slots are padding
             kv_cache_dtype: None or "auto": converted to the caches' dtype, the scales are
                   ignored, as by vLLM; "fp8", "fp8_e4m3" or "fp8_e5m2": caches of uint8
             k_scale, v_scale: floats or tensors of one element or (num_kv_heads,): fp8 stores
                   key / k_scale, and where that is too large the largest number there is
    Raises:  TypeError, ValueError: the argument, its value, and what it should be; nothing is
                   written. A slot beyond the pool is looked for on a CPU only: elsewhere it would
                   cost a synchronisation
    Source:  vLLM vllm/_custom_ops.py, reshape_and_cache; csrc/cache_kernels.cu
    """
    kv_cache_dtype, k_scale, v_scale = cache_options(kv_cache_dtype, k_scale, v_scale)
    check_cache_dtypes(key_cache, value_cache, kv_cache_dtype)
    geometry = cache_geometry(key_cache, value_cache, "vllm")
    _check(key, value, key_cache, slot_mapping, geometry)
    num_slots = len(slot_mapping)
    if not num_slots or not geometry.num_blocks:
        return
    # Nothing is read back to the host to find the slots to skip: a skipped token writes what the
    # first kept one does, or if there is none, what slot 0 holds.
    kept = slot_mapping >= 0
    tokens = torch.arange(num_slots, device=kept.device)
    tokens = torch.where(kept, tokens, kept.int().argmax())
    slots = slot_mapping[tokens].long()
    place = slots.clamp(min=0) // geometry.block_size, slots.clamp(min=0) % geometry.block_size
    meaning = element_dtype(key_cache.dtype, kv_cache_dtype)
    if meaning.itemsize == 1:  # bytes are moved as bytes
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        k_scale = _divisor("k_scale", k_scale, key)
        v_scale = _divisor("v_scale", v_scale, key)
    caches = tokens_of(key_cache, value_cache, "vllm")  # each (num_blocks, block_size, ...)
    for cache, new, scale in zip(caches, (key, value), (k_scale, v_scale)):
        new = new[tokens]
        new = _saturated(new, scale, meaning) if meaning.itemsize == 1 else new.to(cache.dtype)
        new = new.reshape(num_slots, *cache.shape[2:])
        any_kept = kept.any().view(*[1] * new.dim())
        cache.index_put_(place, torch.where(any_kept, new, cache[place]))


def _divisor(name, scale, key):
    """A float, or (1 or num_kv_heads, 1), float32."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 and scale.shape != key.shape[1:2]:
            raise ValueError(
                f"{name} must have one element or shape ({key.shape[1]},), one per KV head, "
                f"got shape {tuple(scale.shape)}"
            )
        return scale.to(key.device, torch.float32).reshape(-1, 1)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{name} must be a number or a tensor, got {scale!r}")
    return float(scale)


def _saturated(tensor, scale, meaning):
    """tensor / scale as bytes of a float8 dtype; what it can't hold becomes its largest."""
    largest = torch.finfo(meaning).max
    return (tensor.float() / scale).clamp(-largest, largest).to(meaning).view(torch.uint8)


def _check(key, value, key_cache, slot_mapping, geometry):
    tensors = {"key": key, "value": value, "slot_mapping": slot_mapping}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {tensor!r}")
        if tensor.device != key_cache.device:
            raise ValueError(f"{name} must be on {key_cache.device}, got {tensor.device}")
    for name in ("key", "value"):
        shape = tuple(tensors[name].shape)
        if not tensors[name].is_floating_point():
            raise TypeError(f"{name} must be floating, got {tensors[name].dtype}")
        wanted = (*key.shape[:1], geometry.num_kv_heads, geometry.head_size)
        if shape != wanted:
            raise ValueError(
                f"{name} must be (num_tokens, num_kv_heads, head_size), {wanted} for key "
                f"{tuple(key.shape)} and these caches, got {shape}"
            )
    if slot_mapping.dtype not in INTS:
        raise TypeError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")
    if slot_mapping.dim() != 1 or len(slot_mapping) > len(key):
        raise ValueError(
            f"slot_mapping must be (num_slots,), for {len(key)} tokens at most, "
            f"got {tuple(slot_mapping.shape)}"
        )
    pool = geometry.num_blocks * geometry.block_size
    if slot_mapping.is_cpu and len(slot_mapping) and int(slot_mapping.max()) >= pool:
        raise ValueError(
            f"slot_mapping must be below {pool}, the slots of the pool, "
            f"got {int(slot_mapping.max())}"
        )
