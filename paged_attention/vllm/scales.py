"""What vLLM's kv_cache_dtype, k_scale and v_scale mean, in all the ways they are passed."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor

from paged_attention.kernel.checks import refuse
from paged_attention.kernel.options import LARGEST, SMALLEST
from paged_attention.kernel.transforms import is_traced


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
             TypeError, ValueError: a scale is no number, or one that can't scale anything. What
             tensors hold is read on a CPU only
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
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(name, scale)
    return CacheOptions(kv_cache_dtype, k_scale, v_scale)


def _check_scale(name: str, scale: object) -> None:
    """Check that a scale, of either sign, is something to multiply with and to divide by."""
    values: list[Any]
    if isinstance(scale, Tensor):
        values = scale.flatten().tolist() if scale.is_cpu and not is_traced(scale) else []
    elif isinstance(scale, Real) and not isinstance(scale, bool):
        values = [scale]
    else:
        refuse(name, "a number or a tensor", repr(scale), TypeError)
    for value in values:
        if not SMALLEST <= abs(value) <= LARGEST:  # NaN isn't, either
            refuse(name, "finite in float32, and not 0", value)
