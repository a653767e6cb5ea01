"""The errors that every argument can cause: a message names the argument, its rule and its value.

Nothing here reads what a tensor holds.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from .aliasing import overlap, overlaps_itself

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)


def refuse(name: str, rule: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise "{name} must be {rule}, got {got}"."""
    raise error(f"{name} must be {rule}, got {got}")


def require_tensor(
    name: str,
    tensor: object,
    dtypes: Sequence[torch.dtype] | None = None,
    shape: Sequence[int] | None = None,
    device: torch.device | None = None,
    like: str = "query",
) -> None:
    """Check that an argument is a dense tensor, and whatever else is given.

    Args:    dtypes: of which it must have one
             like: the argument that has this shape and device, for the message
    Raises:  TypeError: no dense tensor, or another dtype;  ValueError: another shape or device
    """
    if not isinstance(tensor, Tensor):
        refuse(name, "a tensor", f"{type(tensor).__name__}: {tensor!r}", TypeError)
    if tensor.layout != torch.strided:
        refuse(name, "a dense tensor", tensor.layout, TypeError)
    if dtypes is not None and tensor.dtype not in dtypes:
        *others, last = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)
        rule = f"{', '.join(others)} or {last}" if others else last
        refuse(name, rule, tensor.dtype, TypeError)
    if shape is not None and tensor.shape != tuple(shape):
        refuse(name, f"{tuple(shape)} like {like}", tuple(tensor.shape))
    if device is not None and tensor.device != device:
        refuse(name, f"on {device} like {like}", tensor.device)


def require_floating(name: str, tensor: Tensor) -> None:
    """Check that an argument is a dense tensor of any floating dtype."""
    require_tensor(name, tensor)
    if not tensor.is_floating_point():
        refuse(name, "floating", tensor.dtype, TypeError)


def check_out(out: Tensor, query: Tensor, inputs: Mapping[str, object]) -> None:
    """Check that `out` can be written to while the inputs are read.

    Args:    inputs: all that is read, by name. What is no tensor is passed over
    """
    require_tensor("out", out, (query.dtype, torch.float32), query.shape, query.device)
    if overlaps_itself(out):
        refuse("out", "of elements that don't overlap", f"{tuple(out.shape)}, {out.stride()}")
    if out.requires_grad:
        raise ValueError("out must not require grad, because it is written to in place")
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor) and overlap(out, tensor):
            addresses = f"{out.data_ptr():#x} and {tensor.data_ptr():#x}"
            raise ValueError(
                f"out must not overlap {name}, got memory that intersects, from {addresses} on"
            )


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(name, "True or False", repr(value), TypeError)


def required_count(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least `least`, as an int, because numpy's numbers wrap around."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(name, "a whole number", repr(value), TypeError)
    if not least <= int(value) < 2**63:
        refuse(name, f"at least {least}, and below 2**63", repr(value))
    return int(value)


def optional_count(name: str, value: object, least: int = 1) -> int | None:
    """As required_count, but None stays None."""
    return None if value is None else required_count(name, value, least)


def checked_device(device: object) -> torch.device:
    """The device with its index, if this PyTorch can put a tensor on it."""
    try:
        return torch.empty(0, device=device).device  # pyright: ignore[reportCallIssue, reportArgumentType]: refused below
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device must be one that this PyTorch has, got {device!r}") from error
