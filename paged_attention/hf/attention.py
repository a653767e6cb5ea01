"""The attention that hf/cache.py registers with transformers: a forward pass through a pool.

Prompts and new tokens take one way: their keys and values are written, and then all their queries
read what the pool holds.
"""

from typing import NamedTuple

import torch

from paged_attention.kernel.plan import plan_decode

NAME = "paged_attention"
QUERIES = 64  # of a row at a time: on a CPU more are no faster, and take more memory


class Mask(NamedTuple):
    """What a model's mask becomes. That a query sees no later key, the kernel knows itself."""

    tokens: torch.Tensor | None  # (rows, columns), bool, what is no padding; None: everything
    window: int | None


class Step:
    """One forward pass: where its tokens go, and how all of its layers attend.

    Args:    num_rows, q_len: rows and columns of the pass, padding included
             tokens: as in Mask
    """

    def __init__(self, cache, num_rows, q_len, tokens):
        self.pool, self.q_len, self.plans = cache.pool, q_len, {}
        if num_rows != len(cache.seq_ids):
            raise ValueError(
                f"seq_ids must name each row of the batch, got {cache.seq_ids!r} for {num_rows}"
            )
        live = torch.tensor(cache.finished).logical_not().unsqueeze(1)
        new = _new_tokens(cache, num_rows, q_len, tokens) & live
        slots = self.pool.extend_all(cache.seq_ids, new.sum(dim=1).tolist())
        self.slots = torch.full(new.shape, -1, dtype=torch.int64, device=slots.device)
        self.slots[new.to(slots.device)] = slots  # (rows, q_len)
        self.tables = self.pool.block_tables(cache.seq_ids)
        self.lens = self.pool.seq_lens(cache.seq_ids)
        cache.columns += q_len

    def planned(self, num_heads, window):
        """The columns, in pieces, each with its plan, and with its rows' lengths at its end."""
        if (num_heads, window) not in self.plans:
            self.plans[num_heads, window] = list(self._plan(num_heads, window))
        return self.plans[num_heads, window]

    def _plan(self, num_heads, window):
        _, block_size, num_kv_heads, head_size = self.pool.geometry
        for start in range(0, self.q_len, QUERIES):
            end = min(start + QUERIES, self.q_len)
            # Padding is left, so a piece that begins before its row does has negative positions,
            # which see nothing.
            lens = (self.lens - (self.q_len - end)).clamp_min_(0)
            plan = plan_decode(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                block_size=block_size,
                layout=self.pool.layout,
                dtype=self.pool.key_cache().dtype,
                device=lens.device,
                seq_lens=lens.tolist(),
                q_len=end - start,
                window=window,
            )
            yield slice(start, end), lens, plan


def _new_tokens(cache, num_rows, q_len, tokens):
    """(rows, q_len), bool, on the CPU: which columns of a pass are tokens; padding is left.

    Raises:  ValueError: tokens says otherwise, or doesn't fit what the pool holds
    """
    if tokens is None:
        return torch.ones(num_rows, q_len, dtype=torch.bool)
    tokens = tokens.cpu()
    new = tokens[:, -q_len:]
    right = cache.pool.seq_lens(cache.seq_ids).cpu() + new.sum(dim=1)
    wrong = (tokens.sum(dim=1) != right) | (new[:, :-1] > new[:, 1:]).any(dim=1)
    wrong &= torch.tensor(cache.finished).logical_not()
    for row in wrong.nonzero().flatten().tolist():
        raise ValueError(
            f"attention_mask[{row}] must be 0 on padding, which is on the left, and 1 on each of "
            f"the row's {right[row]} tokens, got {tokens[row].sum()} ones, ending in "
            f"{new[row, -8:].int().tolist()}"
        )
    return new


def mask(*args, attention_mask=None, local_size=None, allow_is_causal_skip=True, **kwargs):
    """The function that transformers makes masks by; attention_mask: as in `Mask.tokens`.

    Raises:  NotImplementedError: a mask of other than causal attention, whole or to a window
    """
    if not allow_is_causal_skip or kwargs.get("use_vmap"):
        raise NotImplementedError(
            f"{NAME} serves causal attention, whole or to a window, and the model asks for another"
        )
    return Mask(attention_mask, local_size)


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    position_bias=None,
    **kwargs,
):
    """Store a layer's new keys and values in the pool, then attend to what it holds. No gradients.

    Args:    query: (rows, num_heads, q_len, head_size)
             key, value: (rows, num_kv_heads, q_len, head_size), as PagedLayer.update gave them
             attention_mask: a Mask;  s_aux: sinks;  kwargs: of no consequence for the result
    Returns: (rows, q_len, num_heads, head_size), 0 where a query is padding; None for the weights
    """
    layer = getattr(key, "paged_layer", None)
    if layer is None:
        raise ValueError(f"{NAME} needs the model's cache to be a PagedCache")
    if not isinstance(attention_mask, Mask):
        raise ValueError(
            f"attention_mask must be (rows, columns) or None for {NAME}, got "
            f"{type(attention_mask).__name__} {tuple(getattr(attention_mask, 'shape', ()))}"
        )
    for name, got, served in (
        ("dropout", dropout, (0,)),
        ("is_causal", is_causal, (None, True)),
        ("position_bias", position_bias, (None,)),
        ("sliding_window", sliding_window, (attention_mask.window,)),  # no window of other kinds
    ):
        if got not in served:
            raise NotImplementedError(f"{name}={got!r} is not served by {NAME}, only {served}")
    cache, number = layer.cache, layer.number
    if cache.step is None:  # the first of the model's attention layers
        cache.step = Step(cache, len(query), query.shape[2], attention_mask.tokens)
    step, pool = cache.step, cache.pool
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    pool.write(key.flatten(0, 1), value.flatten(0, 1), step.slots.flatten(), number)
    caches = pool.key_cache(number), pool.value_cache(number)
    out = query.new_empty(query.shape)
    for columns, lens, plan in step.planned(query.shape[2], sliding_window):
        plan.run(
            query[:, columns],
            *caches,
            step.tables,
            lens,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            out=out[:, columns],
        )
    return out, None
