"""What happens to a wave's logits between its two GEMMs: softcap, bias, mask, in this order.

Everything positional follows from one number, how far a key lies behind a query: query position
minus key position. A causal query sees what is 0 or more behind it, a window ends it, and ALiBi is
a slope times it.
"""

from typing import NamedTuple

import torch


class Mask(NamedTuple):
    """What the queries of a wave see; each None where it isn't needed."""

    behind: torch.Tensor | None  # (work items, q_len, width), float32, for ALiBi
    hidden: torch.Tensor | None  # (work items, q_len or 1, n), bool, for each item's last n slots
    dead: torch.Tensor | None  # (work items, n), bool: hidden from all rows, a value no row takes


def wave_mask(schedule, wave, options, left, views):
    """The mask of a wave.

    Args:    left: (work items,), int64, tokens from an item's start to its sequence's end
    """
    _, _, _, block_size, _, q_len, window = schedule.heads
    rows = q_len if options.causal else 1  # all rows see the same keys, as the last one does
    left, biased = left[wave.items], options.alibi_slopes is not None
    ends, windowed = wave.least < rows, window is not None and wave.most > window
    if not (ends or windowed or biased):
        return Mask(None, None, None)
    if rows == 1 and window is None and not biased:
        # An exact schedule's items end within their last block; a static one's anywhere.
        slots = schedule.counting[: wave.width]
        slots = slots if schedule.static else slots[-block_size:]
        dead = views("hidden", wave.num_items, len(slots))
        torch.ge(slots, left.unsqueeze(1), out=dead)
        return Mask(None, dead.unsqueeze(1), dead)
    shape = wave.num_items, rows, wave.width
    offsets = schedule.offsets[-rows:, : wave.width]
    behind = torch.sub(left.view(-1, 1, 1), offsets, out=views("behind", *shape))
    bias = views("distance", *shape).copy_(behind) if biased else None
    hidden = dead = None
    if windowed:
        hidden = views("hidden", *shape)
        seen = torch.clamp(behind, 0, window - 1, out=views("seen", *shape))
        torch.ne(behind, seen, out=hidden)
    elif ends:
        hidden = torch.lt(behind, 0, out=views("hidden", *shape))
    if hidden is not None:
        dead = hidden[:, 0]
        if rows > 1:
            dead = torch.all(hidden, 1, out=views("dead", wave.num_items, wave.width))
    return Mask(bias, hidden, dead)


def adjust(logits, mask, softcap, slopes):
    """Cap, bias and mask logits in place.

    Args:    logits: (items, rows, width), scaled
             softcap: None or a float;  slopes: None or (num_heads, 1, 1), float32
    """
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if slopes is not None:
        _by_head(logits, mask.behind).addcmul_(mask.behind.unsqueeze(1), slopes, value=-1)
    if mask.hidden is not None:
        last = _by_head(logits, mask.hidden)[..., -mask.hidden.shape[2] :]
        last.masked_fill_(mask.hidden.unsqueeze(1), -torch.inf)


def _by_head(logits, of_rows):
    """(work items, num_heads, q_len, width); heads and query tokens together, if of_rows, (work
    items, q_len or 1, ..), is the same for all rows."""
    return logits.view(*of_rows.shape[:1], -1, of_rows.shape[1], logits.shape[2])
