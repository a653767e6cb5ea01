"""What happens to a wave between its two matrix products: softcap, bias and mask of the logits,
and zeros for the values that no query sees.

All of it follows from one number, the distance from a key to a query, which is the query's
position less the key's. A causal query sees keys at distances of 0 and more. A window ends at a
distance. ALiBi takes a slope times the distance off a logit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .gather import select
from .schedule import Wave
from .sharing import Sharing
from .step import Step


class Mask(NamedTuple):
    """Which keys the queries of a wave see. Each part is None where the wave doesn't need it.

    The masks cover an item's last n slots, because all slots before them are seen.
    """

    bias_distance: Tensor | None  # (items, q_len, width), float32, for ALiBi. Of a shared wave,
    # (items, group, width), in which no key is masked
    masked: Tensor | None  # (items, q_len or 1, n), bool: keys that a query token doesn't see
    masked_for_all_rows: Tensor | None  # (items, n), bool: keys that no query token sees


def wave_mask(step: Step, wave: Wave, tokens_to_end: Tensor) -> Mask:
    """The mask of a wave.

    Args:    tokens_to_end: (all items,), int64, from an item's start to its sequence's end
    """
    schedule, options, buffers = step
    if wave.sharing is not None:
        return Mask(_row_distance(step, wave, wave.sharing), None, None)
    shape, window = schedule.shape, schedule.shape.window
    # Without a causal mask all rows see the same keys, as the last row does.
    rows = shape.q_len if options.causal else 1
    biased = options.alibi_slopes is not None
    ends = wave.min_tokens_from_last_slot < rows
    windowed = window is not None and wave.max_tokens_from_first_slot > window
    if not (ends or windowed or biased):
        return Mask(None, None, None)
    to_end = tokens_to_end[wave.items]
    if rows == 1 and window is None and not biased:
        # An exact schedule's items end within their last block, a capacity schedule's anywhere.
        slots = schedule.arange[: wave.width]
        slots = slots if schedule.is_capacity else slots[-shape.block_size :]
        past_end = torch.ge(
            slots, to_end.unsqueeze(1), out=buffers.masked(wave.num_items, len(slots))
        )
        return Mask(None, past_end.unsqueeze(1), past_end)
    size = wave.num_items, rows, wave.width
    distance = torch.sub(
        to_end.view(-1, 1, 1),
        schedule.distance_offsets[-rows:, : wave.width],
        out=buffers.distance(*size),
    )
    bias_distance = buffers.bias_distance(*size).copy_(distance) if biased else None
    if not (windowed or ends):
        return Mask(bias_distance, None, None)
    if windowed and window is not None:
        nearest = torch.clamp(distance, 0, window - 1, out=buffers.clamped_distance(*size))
        masked = torch.ne(distance, nearest, out=buffers.masked(*size))
    else:
        masked = torch.lt(distance, 0, out=buffers.masked(*size))
    masked_for_all_rows = masked[:, 0]
    if rows > 1:
        out = buffers.masked_for_all_rows(wave.num_items, wave.width)
        masked_for_all_rows = torch.all(masked, 1, out=out)
    return Mask(bias_distance, masked, masked_for_all_rows)


def _row_distance(step: Step, wave: Wave, sharing: Sharing) -> Tensor | None:
    """(items, rows, width), for ALiBi: each row of a shared wave has a position of its own."""
    if step.options.alibi_slopes is None:
        return None
    distance = step.buffers.bias_distance(wave.num_items, wave.group, wave.width)
    return torch.sub(sharing.ends, sharing.slots, out=distance)


def adjust(logits: Tensor, mask: Mask, softcap: float | None, slopes: Tensor | None) -> None:
    """Cap, bias and mask logits in place.

    Args:    logits: (items * num_kv_heads, group, width), scaled
             slopes: None, or (num_heads, 1, 1), float32. Of a shared wave, as `wave_slopes`
    """
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)  # each reads and writes the logits
    if slopes is not None and mask.bias_distance is not None:
        distance = mask.bias_distance
        _by_head(logits, distance).addcmul_(distance.unsqueeze(1), slopes, value=-1)
    if mask.masked is not None:
        last = _by_head(logits, mask.masked)[..., -mask.masked.shape[2] :]
        last.masked_fill_(mask.masked.unsqueeze(1), -torch.inf)


def wave_slopes(step: Step, wave: Wave, slopes: Tensor | None) -> Tensor | None:
    """The slope of each row of a shared wave, (num_kv_heads, group, 1)."""
    if slopes is None or wave.sharing is None:
        return slopes
    heads = wave.sharing.heads
    row_slopes = select(slopes.view(-1), heads, step.buffers.row_slopes(len(heads)))
    return row_slopes.view(-1, wave.group, 1)


def hide_values(values: Tensor, mask: Mask) -> None:
    """Zero the values that no query sees, because 0 times NaN is NaN.

    Args:    values: (items * num_kv_heads, width, lanes), float32
    """
    masked = mask.masked_for_all_rows
    if masked is None:
        return
    # A CPU masks element by element, so it is faster with fewer, wider elements.
    wide = values.view(torch.complex128) if values.is_cpu else values
    last = wide.unflatten(0, (len(masked), -1))[:, :, -masked.shape[1] :]
    last.masked_fill_(masked[:, None, :, None], 0.0)


def _by_head(logits: Tensor, of_rows: Tensor) -> Tensor:
    """Logits as (items, num_heads, q_len, width), so that of_rows, (items, q_len, n), broadcasts
    over the heads. If of_rows has one row for all query tokens, heads and tokens stay one
    dimension: (items, num_heads * q_len, 1, width)."""
    return logits.view(of_rows.shape[0], -1, of_rows.shape[1], logits.shape[2])
