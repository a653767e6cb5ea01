"""What may be done to a logit, as one frozen record.

The order on a logit is scale, softcap, bias (ALiBi), mask (causal, window); a sink is one more
state merged after all others.
"""

from dataclasses import dataclass
from numbers import Integral, Real

import torch

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Options:
    """The options of one call, checked.

    scale: multiplies the logits
    softcap: None, or the cap of softcap * tanh(logit / softcap)
    alibi_slopes: None, or (num_heads,), times (key position - query position)
    causal: whether a query sees no key after itself
    window: None, or how many keys a query sees, the newest included
    sinks: None, or (num_heads,), logits that take weight and have no value
    k_scale, v_scale: multiply the cached keys and values; a float or a tensor of one element or
        (num_kv_heads,)
    """

    scale: float
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    causal: bool
    window: int | None
    sinks: torch.Tensor | None
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor


def make_options(
    query, geometry, scale, softcap, alibi_slopes, causal, window, sinks, k_scale, v_scale
):
    """Options from the arguments of `paged_attention`; scale=None is head_size ** -0.5.

    Raises:  TypeError, ValueError: the argument, its value, and what it should be. The values of
             tensors aren't read: `check_values` does
    """
    num_heads, device = query.shape[-2], query.device
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if window is not None and not _is(Integral, window):
        raise TypeError(f"window must be a whole number of keys, got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key, the newest, got {window!r}")
    if softcap is not None:
        softcap = _finite("softcap", softcap)
        if softcap < SMALLEST:  # float32 would make 0 of it
            raise ValueError(f"softcap must be greater than 0, in float32 too, got {softcap!r}")
    alibi_slopes = _per_head("alibi_slopes", alibi_slopes, num_heads, device)
    sinks = _per_head("sinks", sinks, num_heads, device)
    for name, value in (("window", window), ("alibi_slopes", alibi_slopes)):
        if not causal and value is not None:
            raise ValueError(f"{name} must be None with causal=False, got {value!r}")
    return Options(
        scale=geometry.head_size**-0.5 if scale is None else _finite("scale", scale),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        causal=causal,
        window=None if window is None else int(window),
        sinks=sinks,
        k_scale=_cache_scale("k_scale", k_scale, geometry.num_kv_heads, device),
        v_scale=_cache_scale("v_scale", v_scale, geometry.num_kv_heads, device),
    )


def check_values(options):
    """Check what the options' tensors hold; on an accelerator each read is a synchronisation.

    Raises:  ValueError: a slope or a scale isn't finite, or a sink is neither finite nor -inf,
             which is no sink
    """
    for name in ("alibi_slopes", "sinks", "k_scale", "v_scale"):
        value = getattr(options, name)
        if isinstance(value, torch.Tensor):
            wrong = [x for x in value.flatten().tolist() if not abs(x) <= LARGEST]
            if wrong and not (name == "sinks" and set(wrong) == {-torch.inf}):
                raise ValueError(f"{name} must be finite in float32, got {wrong[0]}")


def _per_head(name, value, num_heads, device):
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {value!r}")
    _check_floating(name, value)
    if value.shape != (num_heads,):
        raise ValueError(f"{name} must be (num_heads,) = ({num_heads},), got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like query, got {value.device}")
    return value


def _cache_scale(name, value, num_kv_heads, device):
    if not isinstance(value, torch.Tensor):
        return _finite(name, value)
    _check_floating(name, value)
    if value.numel() != 1 and value.shape != (num_kv_heads,):
        raise ValueError(
            f"{name} must have one element or shape ({num_kv_heads},), one per KV head, "
            f"got shape {tuple(value.shape)}"
        )
    if value.device != device and not (value.dim() == 0 and value.device.type == "cpu"):
        raise ValueError(f"{name} must be on {device} like query, got {value.device}")
    return value.reshape(()) if value.numel() == 1 else value


def _check_floating(name, value):
    if not value.is_floating_point() or value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a floating, dense tensor, got {value.dtype}, {value.layout}"
        )


def _finite(name, value):
    """A number as a float, within what float32 can hold."""
    if not _is(Real, value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(value) <= LARGEST:  # NaN is no number of that kind either
        raise ValueError(f"{name} must be finite in float32, got {value!r}")
    return float(value)


def _is(kind, value):
    return isinstance(value, kind) and not isinstance(value, bool)
