"""What may be done to a logit, as one frozen record.

The order on a logit is scale, softcap, bias (ALiBi), mask (causal, window); a sink is one more
state merged after all others. This version of the kernel applies the scales; asking for one of
the others is refused by name, never ignored.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch

NOT_YET = "is not implemented in this version of paged_attention"
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Options:
    """scale multiplies the logits; k_scale and v_scale multiply the cached keys and values, each
    a float or a tensor that broadcasts against (num_kv_heads, 1, 1)."""

    scale: float
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor


def make_options(
    num_kv_heads,
    head_size,
    device,
    *,
    scale,
    kv_cache_dtype,
    k_scale,
    v_scale,
    alibi_slopes,
    window,
    softcap,
    sinks,
    causal,
):
    """Options from the arguments of `paged_attention`; scale=None is head_size ** -0.5.

    Raises:  TypeError, ValueError: an argument that no version would take, with its value
             NotImplementedError: an option this version does not apply, by name
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if window is not None and not _is(Integral, window):
        raise TypeError(f"window must be a whole number of keys, got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key, the newest, got {window!r}")
    if softcap is not None and not _is(Real, softcap):
        raise TypeError(f"softcap must be a number, got {softcap!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be greater than 0, got {softcap!r}")
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {kv_cache_dtype!r}"
        )
    for name, value, default in (
        ("alibi_slopes", alibi_slopes, None),
        ("window", window, None),
        ("softcap", softcap, None),
        ("sinks", sinks, None),
        ("causal", causal, True),
        ("kv_cache_dtype", kv_cache_dtype, "auto"),
    ):
        if value is not default and value != default:
            raise NotImplementedError(f"{name}={value!r} {NOT_YET}")
    return Options(
        head_size**-0.5 if scale is None else _finite("scale", scale),
        _cache_scale("k_scale", k_scale, num_kv_heads, device),
        _cache_scale("v_scale", v_scale, num_kv_heads, device),
    )


def _cache_scale(name, value, num_kv_heads, device):
    if not isinstance(value, torch.Tensor):
        return _finite(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {value.dtype}")
    if value.numel() != 1 and value.shape != (num_kv_heads,):
        raise ValueError(
            f"{name} must have one element or shape ({num_kv_heads},), one per KV head, "
            f"got shape {tuple(value.shape)}"
        )
    if value.device != device and not (value.dim() == 0 and value.device.type == "cpu"):
        raise ValueError(f"{name} must be on {device} like query, got {value.device}")
    value = value.float()
    return value.reshape(()) if value.numel() == 1 else value.view(num_kv_heads, 1, 1)


def _finite(name, value):
    if not _is(Real, value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def _is(kind, value):
    return isinstance(value, kind) and not isinstance(value, bool)
