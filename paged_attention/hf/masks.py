"""What a model's mask becomes, and which columns of a forward pass are tokens.

A pool holds tokens and no padding, and the kernel hides the keys after a query token. So all that
is left of a mask is where the padding is, and how wide the window is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_attention.hf.keywords import NAME
from paged_attention.kernel.checks import refuse
from paged_attention.kernel.transforms import uncompiled


@dataclass(frozen=True)
class CausalMask:
    """What `attention` is given as a mask."""

    is_token: Tensor | None  # (rows, columns so far), bool, False on padding. None: no padding
    window: int | None  # how many keys a query sees, the newest included
    is_served: bool = True
    last: int | None = None  # only as many of the newest queries attend. None: all do

    def __getitem__(self, key: tuple) -> CausalMask:
        """The mask of the newest queries, [:, :, -n:, :]. Gemma 4 takes it for its last layers."""
        rows, heads, queries, keys = key
        if not rows == heads == keys == slice(None) or queries != slice(queries.start, None):
            refuse("attention_mask", f"whole, or [:, :, -n:, :] for {NAME}", key)
        return replace(self, last=-queries.start or None)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{NAME} has no mask of numbers, and the model asks for its .{name}")


@uncompiled
def causal_mask(
    *args,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    mask_function: Callable | None = None,
    **options,
) -> CausalMask:
    """The function that transformers makes masks by.

    A mask of another kind is marked here, and refused where it is used. Some models make masks
    that nobody uses.

    Args:    attention_mask: as `CausalMask.is_token`
             local_size: as `CausalMask.window`
             mask_function: whether a query sees a key, as transformers has it
    """
    is_plain = options.get("allow_is_causal_skip", True) and not options.get("use_vmap")
    if is_plain and mask_function is not None:
        is_plain = _is_causal(mask_function, local_size)
    return CausalMask(attention_mask, local_size, bool(is_plain))


def _is_causal(mask_function: Callable, window: int | None) -> bool:
    """Whether a mask function hides what `window` hides, tried on one query."""
    query = torch.tensor(window or 2, device="cpu")
    keys = torch.arange(int(query) + 2, device="cpu")
    return (
        mask_function(0, 0, query, keys)
        .cpu()
        .equal((keys <= query) & (keys > query - (window or 3)))
    )


def check_mask(mask: object, sliding_window: int | None) -> CausalMask:
    """The mask that `attention` was given, if it can be served.

    Args:    sliding_window: what the layer says of its window. It may say nothing
    Raises:  ValueError: it isn't one that `causal_mask` made
             NotImplementedError: it isn't causal, or its window isn't the layer's
    """
    if not isinstance(mask, CausalMask):
        got = f"{type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}"
        refuse("attention_mask", f"(rows, columns) or None for {NAME}", got)
    if not mask.is_served:
        raise NotImplementedError(
            f"{NAME} serves causal attention, whole or to a window, and the model asks for another"
        )
    if sliding_window not in (None, mask.window):
        rule = f"only {mask.window}, the mask's"
        raise NotImplementedError(
            f"sliding_window={sliding_window!r} is not served by {NAME}, {rule}"
        )
    return mask


def new_tokens(is_token: Tensor, q_len: int, held: Tensor, live: Tensor) -> Tensor:
    """(rows, q_len), bool. True where a column of a pass is a token.

    Args:    is_token: as `CausalMask.is_token`
             held: (rows,), the tokens that the pool holds of each row
             live: (rows,), bool, False for rows that are finished. Those aren't checked
    Raises:  ValueError: padding isn't on the left alone, or is_token doesn't fit what is held
    """
    new = is_token[:, -q_len:]
    right = held + new.sum(dim=1)
    wrong = (is_token.sum(dim=1) != right) | (new[:, :-1] > new[:, 1:]).any(dim=1)
    for row in (wrong & live).nonzero().flatten().tolist():
        rule = f"0 on padding, which is on the left, 1 on each of the row's {right[row]} tokens"
        got = f"{is_token[row].sum()} ones, ending in {new[row, -8:].int().tolist()}"
        refuse(f"attention_mask[{row}]", rule, got + AGAIN)
    return new


def first_positions(
    position_ids: Tensor, is_new: Tensor, held: Tensor, first: list[int], columns: int
) -> list[int]:
    """The position of each row's first token, after a check that the new ones go on from there.

    A text begins at 0 or, because models count so by themselves, at the number of columns that are
    padding.

    Args:    position_ids: (rows or 1, q_len), as the model has them
             is_new: as `new_tokens` returns it;  held: as there
             first: what it is, of each row. -1 if it isn't known yet, because the row is new
             columns: how many were there before this pass
    Returns: as first
    Raises:  ValueError: position_ids begin again, jump, or don't go on from what is held
    """
    position_ids = position_ids.expand(is_new.shape)
    index = is_new.int().argmax(dim=1)
    start = position_ids.gather(1, index[:, None]).squeeze(1)
    start = torch.where(start == columns + index, start, 0)
    known = torch.tensor(first, dtype=torch.int64, device="cpu")
    known = torch.where((known < 0) & is_new.any(dim=1), start, known)
    right = known[:, None] + held[:, None] + is_new.cumsum(dim=1) - 1
    wrong = ((position_ids != right) & is_new).any(dim=1)
    for row in wrong.nonzero().flatten().tolist():
        got = position_ids[row][is_new[row]].tolist()
        rule = f"{right[row][is_new[row]][0]} and on, each 1 more than the one before"
        refuse(f"position_ids[{row}]", rule, f"{str(got[:8])}{AGAIN}")
    return known.tolist()


AGAIN = " (with use_cache=False, generate sends the whole text again)"
