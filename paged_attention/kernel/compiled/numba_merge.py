"""The end of the compiled pass: states of several partitions into one, and a row's result."""

# numba's intrinsics and its re-exports are unknown to a type checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math

import numpy as np
from numba import carray, njit

from .numba_tiles import pointer

_ZERO, _NO_LOGIT, _NAN = np.float32(0), np.float32(-np.inf), np.float32(np.nan)
_ALL = 1 << 40  # elements behind an address: more than there are. Nobody asks for the end


@njit
def write_row(acc, s, m, seq, head, r, sizes, addresses, scales):
    """out = acc / s * v_scale and lse = m + ln s, or (0, -inf) where no key was seen."""
    (kv_heads, group, q_len, lanes, _, _, _, _, _, _,
     _, _, _, _, _, has_sinks, wants_lse, _, _) = sizes  # fmt: skip
    out = carray(pointer(addresses[4]), (_ALL,), np.float32)
    query_head = head * group + r // q_len
    row = (seq * q_len + r % q_len) * kv_heads * group + query_head
    weight = np.float32(1)
    if has_sinks:
        sink = carray(pointer(addresses[8]), (_ALL,), np.float32)[query_head]
        if sink != _NO_LOGIT or s == _ZERO:
            top = m if s != _ZERO and not m < sink else sink
            if s != _ZERO:
                weight = np.float32(math.exp(m - top))
            s = s * weight + (np.float32(math.exp(sink - top)) if sink != _NO_LOGIT else _ZERO)
            m = top
    if s == _ZERO:
        for d in range(lanes):
            out[row * lanes + d] = _ZERO
    else:
        factor = weight / s
        for d in range(lanes):
            out[row * lanes + d] = acc[d] * factor * scales[head, 1]
    if wants_lse:
        lse = carray(pointer(addresses[5]), (_ALL,), np.float32)
        lse[row] = _NO_LOGIT if s == _ZERO else m + np.float32(math.log(s))


@njit(nogil=True, cache=True)
def merge(sizes, first_states, lens, addresses, scales):
    """Finish the sequences that have several partitions, none, or too many tokens."""
    (kv_heads, group, q_len, lanes, block_size, partition, _, longest, _, _,
     _, _, window, _, _, _, _, _, _) = sizes  # fmt: skip
    states = carray(pointer(addresses[6]), (_ALL,), np.float32)
    rows = group * q_len
    acc = np.empty(lanes, np.float32)
    for seq in range(len(lens)):
        length = lens[seq]
        start = 0
        if window > 0:
            start = max(0, length - (window + q_len - 1)) // block_size * block_size
        num_parts = max(1, -(-(length - start) // partition))
        if length > longest:
            acc[:] = _NAN
            for head in range(kv_heads):
                for r in range(rows):
                    write_row(acc, _NAN, _NAN, seq, head, r, sizes, addresses, scales)
        elif num_parts > 1:
            step = kv_heads * rows * (lanes + 2)
            for head in range(kv_heads):
                for r in range(rows):
                    place = (first_states[seq] * kv_heads + head) * rows * (lanes + 2) + r * (
                        lanes + 2
                    )
                    top = _NO_LOGIT
                    for part in range(num_parts):
                        top = max(top, states[place + part * step + lanes + 1])
                    acc[:] = _ZERO
                    s = _ZERO
                    for part in range(num_parts):
                        at = place + part * step
                        if states[at + lanes] != _ZERO:  # NaN isn't 0
                            factor = np.float32(math.exp(states[at + lanes + 1] - top))
                            s += factor * states[at + lanes]
                            for d in range(lanes):
                                acc[d] += factor * states[at + d]
                    write_row(acc, s, top, seq, head, r, sizes, addresses, scales)
