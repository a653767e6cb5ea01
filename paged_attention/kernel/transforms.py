"""What PyTorch may do with a call from outside: compile it, trace it, batch it, differentiate it.

A call turns lengths into Python's integers, and it uses memory again. PyTorch can't trace that. So
a call is run as it is, or refused.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]

from .checks import refuse

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, around which torch.compile breaks its graph.

    `torch.compiler.disable` does it. It is asked only where the compiler was imported, because
    that import takes longer than the import of this package.
    """
    disabled: list[Callable] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # pyright: ignore[reportAttributeAccessIssue]: the mark that torch.compile looks for
    return call  # pyright: ignore[reportReturnType]: it has function's signature


def is_traced(tensor: Tensor) -> bool:
    """Whether a tracer made this tensor, as FakeTensorMode, make_fx and torch.export do.

    Such a tensor has no memory, or none that outlives the tracing. So what was made beside it may
    not be kept for the next call.
    """
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def refuse_transforms(name: str, tensor: Tensor) -> None:
    """Raise for torch.func's tensors, and under torch.jit.trace.

    A trace would keep one call's lengths for all later ones.
    """
    if torch._C._get_tracing_state() is not None:
        refuse(name, "given to an untraced call, because its length is read", "torch.jit.trace")
    if is_functorch_wrapped_tensor(tensor):
        refuse(name, "given outside of torch.func's transforms", "one of vmap or grad")


def refuse_gradients(tensors: Mapping[str, object]) -> None:
    """Raise if autograd is on and a tensor requires a gradient, because there is no backward."""
    for name, tensor in tensors.items() if torch.is_grad_enabled() else ():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            rule = "detached, or given under torch.no_grad(), because there is no backward"
            refuse(name, rule, "requires_grad=True")
