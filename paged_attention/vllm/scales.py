"""What vLLM's kv_cache_dtype, k_scale and v_scale mean, in all the ways they are passed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CacheOptions(NamedTuple):
    """How cached keys and values are to be read, as this package takes it."""

    kv_cache_dtype: str
    k_scale: float | Tensor
    v_scale: float | Tensor


def cache_options(kv_cache_dtype, k_scale, v_scale):
    """(kv_cache_dtype, k_scale, v_scale) as this package takes them.

    kv_cache_dtype None is "auto" (CoreX's vLLM 0.6.3). Under "auto" the scales are 1.0 whatever
    they are, as in vLLM, which doesn't look at them.

    Raises:  TypeError: this is the call of vLLM before 0.5.3, with one kv_scale for both
    """
    if isinstance(v_scale, int):
        raise TypeError(
            f"v_scale must be a float or a tensor, got the int {v_scale!r}: vLLM before 0.5.3 had "
            "one kv_scale, and tp_rank in this place"
        )
    if (k_scale is None) != (v_scale is None):
        raise TypeError(
            f"k_scale and v_scale must be given both or not at all, got {k_scale!r} and "
            f"{v_scale!r}: the one kv_scale of vLLM before 0.5.3 isn't known here"
        )
    if kv_cache_dtype is None or kv_cache_dtype == "auto":
        return CacheOptions("auto", 1.0, 1.0)
    if k_scale is None or v_scale is None:
        return CacheOptions(kv_cache_dtype, 1.0, 1.0)
    return CacheOptions(kv_cache_dtype, k_scale, v_scale)
