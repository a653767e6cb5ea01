"""Write the step: the reader's function is tried on several shapes, and one sentence says how.

A checker never holds the step's solution. It judges by the float64 reference, by what the result
must be the same as, or by what the call costs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class Misunderstood(Exception):
    """What the reader's function gets wrong, as a sentence."""


class NotTried(Exception):
    """The reader's function returns None for the first thing that it is given."""


def tried(checker: Callable[[Function], str], function: Function) -> str:
    """What a checker says of the reader's function, in a sentence."""
    seen: list[bool] = []

    def watched(*args: Any) -> Any:
        result = function(*args)
        if result is None and not seen:
            raise NotTried
        seen.append(True)
        return result

    try:
        return checker(watched)
    except NotTried:
        return "not tried yet"
    except Misunderstood as error:
        return str(error)


def called(function: Function, *args: Any, case: str) -> Any:
    """What the reader's function returns for copies of the arguments.

    Args:    case: the arguments in words, for the sentence
    Raises:  Misunderstood: it raised, returned nothing, or changed an argument
    """
    given = [x.clone() if isinstance(x, Tensor) else x for x in args]
    try:
        result = function(*given)
    except NotTried:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename != __file__]
        where = f', in the line "{own[0].line}"' if own and own[0].line else ""
        kind, words = type(error).__name__, str(error).strip().split("\n")[0]
        raise Misunderstood(f"it raised {kind} for {case}{where}: {words}") from error
    if result is None:
        raise Misunderstood(f"it returned nothing for {case}")
    for before, after in zip(args, given):
        if isinstance(before, Tensor) and not same(before, after):
            raise Misunderstood(f"it changed one of its arguments for {case}")
    return result


def tensor_of(result: Any, shape: tuple[int, ...], case: str, wrong: dict[Any, str]) -> Tensor:
    """The result as float64, of the right shape.

    Args:    wrong: {a shape that people get: what they missed}
    Raises:  Misunderstood: it is no tensor, or has another shape
    """
    if not isinstance(result, Tensor):
        raise Misunderstood(f"it returned a {type(result).__name__} for {case}, not a tensor")
    if tuple(result.shape) != shape:
        got = tuple(result.shape)
        why = wrong.get(got, f"the result should have the shape {shape}")
        raise Misunderstood(f"shape {got} for {case}: {why}")
    return result.detach().double()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, where NaN equals NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(1.5e30), b.nan_to_num(1.5e30))


def close(got: Tensor, right: Tensor) -> bool:
    """Equal within float32's rounding, relative to the largest element of `right`."""
    finite = right[right.isfinite()].abs()
    bound = 2e-5 * max(1.0, float(finite.max()) if len(finite) else 0.0)
    return bool(torch.isclose(got, right.double(), rtol=0, atol=bound).all())
