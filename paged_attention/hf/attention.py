"""The attention and the mask that `paged_attention.hf` registers with transformers.

Prompts and new tokens are treated alike. A layer writes their keys and values to the pool, and
then all their queries read what the pool holds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attention.cache import PagedKVCache
from paged_attention.kernel.checks import refuse
from paged_attention.kernel.plan import DecodePlan, plan_decode

NAME = "paged_attention"
# Query tokens of a row that attend together. More are no faster on a CPU, and take more memory.
MOST_QUERIES = 64


class CausalMask(NamedTuple):
    """What a model's mask becomes. The kernel itself hides the keys after a query token."""

    is_token: Tensor | None  # (rows, columns so far), bool, False on padding. None: no padding
    window: int | None  # how many keys a query sees, the newest included


def causal_mask(
    *args, attention_mask: Tensor | None = None, local_size: int | None = None, **options
) -> CausalMask:
    """The function that transformers makes masks by.

    Args:    attention_mask: as `CausalMask.is_token`
    Raises:  NotImplementedError: the model asks for a mask of another kind
    """
    if not options.get("allow_is_causal_skip", True) or options.get("use_vmap"):
        raise NotImplementedError(
            f"{NAME} serves causal attention, whole or to a window, and the model asks for another"
        )
    return CausalMask(attention_mask, local_size)


def attention(
    module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Store a layer's new keys and values in the pool, then attend to what it holds. No gradients.

    Args:    query: (rows, num_heads, q_len, head_size)
             key, value: (rows, num_kv_heads, q_len, head_size), as PagedLayer.update gave them
             s_aux: sinks
             others: what transformers passes besides. None of it changes the result
    Returns: (rows, q_len, num_heads, head_size), 0 where a query is padding, and None instead of
             the weights
    """
    layer = getattr(key, "paged_layer", None)
    if layer is None:
        raise ValueError(f"{NAME} needs the model's cache to be a PagedCache")
    if not isinstance(attention_mask, CausalMask):
        got = f"{type(attention_mask).__name__} {tuple(getattr(attention_mask, 'shape', ()))}"
        refuse("attention_mask", f"(rows, columns) or None for {NAME}", got)
    for name, got, served in (
        ("dropout", dropout, (0,)),
        ("is_causal", is_causal, (None, True)),
        ("position_bias", position_bias, (None,)),
        ("sliding_window", sliding_window, (attention_mask.window,)),  # the mask's own
    ):
        if got not in served:
            raise NotImplementedError(f"{name}={got!r} is not served by {NAME}, only {served}")
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    rows, q_len, num_heads, _ = query.shape
    cache, number, pool = layer.cache, layer.number, layer.cache.pool
    this_pass = cache.forward_pass(rows, q_len, attention_mask.is_token)
    pool.write(key.flatten(0, 1), value.flatten(0, 1), this_pass.slots.flatten(), number)
    caches = pool.key_cache(number), pool.value_cache(number)
    out = query.new_empty(query.shape)
    for columns, lens, plan in this_pass.pieces(num_heads, sliding_window):
        options = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "out": out[:, columns]}
        plan.run(query[:, columns], *caches, this_pass.tables, lens, **options)
    return out, None


class ForwardPass:
    """What all layers of one forward pass share: slots, a block table, lengths, and plans.

    Each row of a pass belongs to a sequence. Its columns are new tokens and, on the left, padding.

    Args:    is_new: (rows, q_len), bool, on the CPU. True where a column is a token to be stored
    Raises:  OutOfBlocks: the pool can't hold them. No sequence is extended
    """

    def __init__(self, pool: PagedKVCache, seq_ids: list, is_new: Tensor) -> None:
        slots = pool.extend_all(seq_ids, is_new.sum(dim=1).tolist())
        self.slots = torch.full(is_new.shape, -1, dtype=torch.int64, device=slots.device)
        self.slots[is_new.to(slots.device)] = slots  # (rows, q_len)
        self.tables, self.lens = pool.block_tables(seq_ids), pool.seq_lens(seq_ids)
        self._pool, self._pieces = pool, defaultdict(list)

    def pieces(self, num_heads: int, window: int | None) -> list[Piece]:
        """The pass in pieces, planned once for all layers of the same heads and window."""
        pieces = self._pieces[num_heads, window]
        if pieces:
            return pieces
        q_len, (_, block_size, num_kv_heads, head_size) = self.slots.shape[1], self._pool.geometry
        for start in range(0, q_len, MOST_QUERIES):
            end = min(start + MOST_QUERIES, q_len)
            # Padding is on the left. So the columns before a row's first token have negative
            # positions, which see no key.
            lens = (self.lens - (q_len - end)).clamp_min_(0)
            plan = plan_decode(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=block_size,
                layout=self._pool.layout,
                dtype=self._pool.key_cache().dtype,
                device=lens.device,
                seq_lens=lens.tolist(),
                q_len=end - start,
                window=window,
            )
            pieces.append(Piece(slice(start, end), lens, plan))
        return pieces


class Piece(NamedTuple):
    """Some neighbouring columns of a forward pass, which attend together."""

    columns: slice
    lens: Tensor  # (rows,), the tokens of each row up to the last of these columns
    plan: DecodePlan


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
        refuse(f"attention_mask[{row}]", rule, got)
    return new
