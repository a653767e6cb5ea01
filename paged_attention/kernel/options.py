"""What may be done to a logit, as one frozen record.

The order on a logit is scale, softcap, bias (ALiBi), mask (causal, window). A sink is one more
state, merged after all others.
"""

from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from .checks import check_flag, optional_count, refuse, require_floating, require_tensor
from .layouts import Geometry

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Options:
    """The options of one call, as `paged_attention` takes them.

    scale: multiplies the logits. None, until it is checked, means head_size ** -0.5
    k_scale, v_scale: multiply the cached keys and values. A float, or a tensor of one element or
        (num_kv_heads,)
    alibi_slopes: None, or (num_heads,), times (key position - query position)
    window: None, or how many keys a query sees, the newest included
    softcap: None, or the cap of softcap * tanh(logit / softcap)
    sinks: None, or (num_heads,), logits that take weight and have no value
    causal: whether a query sees no key after itself
    """

    scale: float | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    alibi_slopes: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    causal: bool = True


def checked_options(query: Tensor, geometry: Geometry, given: Options) -> Options:
    """The options given, checked and converted.

    Raises:  TypeError, ValueError: the argument, its value, and what it should be. The values of
             tensors aren't read here, but in `check_option_values`
    """
    check_flag("causal", given.causal)
    softcap = None if given.softcap is None else _finite("softcap", given.softcap)
    if softcap is not None and softcap < SMALLEST:  # float32 would make 0 of it
        refuse("softcap", "greater than 0, in float32 too", softcap)
    for name in ("alibi_slopes", "sinks"):
        if (value := getattr(given, name)) is not None:
            require_floating(name, value)
            require_tensor(name, value, shape=query.shape[-2:-1], device=query.device)
    window = optional_count("window", given.window)
    for name, value in (("window", window), ("alibi_slopes", given.alibi_slopes)):
        if not given.causal and value is not None:
            refuse(name, "None with causal=False", value)
    scale = geometry.head_size**-0.5 if given.scale is None else _finite("scale", given.scale)
    k_scale, v_scale = (
        _cache_scale(name, getattr(given, name), geometry.num_kv_heads, query.device)
        for name in ("k_scale", "v_scale")
    )
    return replace(
        given, scale=scale, softcap=softcap, window=window, k_scale=k_scale, v_scale=v_scale
    )


def check_option_values(options: Options) -> None:
    """Check what the options' tensors hold. On an accelerator each read is a synchronisation.

    Raises:  ValueError: a slope or a scale isn't finite, or a sink is neither finite nor -inf,
             which means no sink
    """
    for name in ("alibi_slopes", "sinks", "k_scale", "v_scale"):
        value = getattr(options, name)
        if isinstance(value, Tensor):
            wrong = [x for x in value.flatten().tolist() if not abs(x) <= LARGEST]
            if wrong and not (name == "sinks" and set(wrong) == {-torch.inf}):
                refuse(name, "finite in float32", wrong[0])


def _cache_scale(
    name: str, value: float | Tensor, num_kv_heads: int, device: torch.device
) -> float | Tensor:
    if not isinstance(value, Tensor):
        return _finite(name, value)
    require_floating(name, value)
    if value.numel() != 1 and value.shape != (num_kv_heads,):
        rule = f"one element or of shape ({num_kv_heads},), one per KV head"
        refuse(name, rule, f"shape {tuple(value.shape)}")
    if not (value.dim() == 0 and value.is_cpu):  # which any device takes as a number
        require_tensor(name, value, device=device)
    return value.reshape(()) if value.numel() == 1 else value


def _finite(name: str, value: object) -> float:
    """A number as a float, within what float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(name, "a number", repr(value), TypeError)
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond float64's range
        number = torch.inf
    if not abs(number) <= LARGEST:  # NaN isn't, either
        refuse(name, "finite in float32", repr(value))
    return number
