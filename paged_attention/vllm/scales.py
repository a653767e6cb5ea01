"""What vLLM's kv_cache_dtype, k_scale and v_scale mean, in all the ways they are passed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CacheOptions(NamedTuple):
    """How cached keys and values are to be read, in this package's terms."""

    kv_cache_dtype: str
    k_scale: float | Tensor
    v_scale: float | Tensor


def cache_options(
    kv_cache_dtype: str | None, k_scale: float | Tensor | None, v_scale: float | Tensor | None
) -> CacheOptions:
    """vLLM's arguments in this package's terms.

    A kv_cache_dtype of None means "auto" (CoreX's vLLM 0.6.3). Under "auto" both scales become
    1.0, because vLLM doesn't look at them either.

    Raises:  TypeError: this is the call of vLLM before 0.5.3, with one kv_scale for both
    """
    if isinstance(v_scale, int) or (k_scale is None) != (v_scale is None):
        raise TypeError(
            f"k_scale and v_scale must be floats or tensors, or both missing, got {k_scale!r} and "
            f"{v_scale!r}. vLLM before 0.5.3 had one kv_scale, and tp_rank in v_scale's place"
        )
    if kv_cache_dtype is None or kv_cache_dtype == "auto":
        return CacheOptions("auto", 1.0, 1.0)
    if k_scale is None or v_scale is None:
        return CacheOptions(kv_cache_dtype, 1.0, 1.0)
    return CacheOptions(kv_cache_dtype, k_scale, v_scale)
