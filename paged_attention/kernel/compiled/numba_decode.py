"""The compiled pass: K and V are read once, where they lie, with an online softmax.

A *unit* of work is one partition of one sequence for one KV head. It walks the partition's tokens
in tiles. For each row it keeps the largest logit so far, the sum of weights and the weighted sum
of values. When a larger logit comes, the sums are rescaled. While keys are multiplied, the tile's
values are fetched, and while values are added up, the next tile's keys are.

A sequence of one partition is finished at once. The others leave states, which `numba_merge.py`
adds up in the order of the partitions.

What comes in is addresses, strides and numbers, so that one compiled function serves all dtypes.
"""

# numba's intrinsics and its re-exports are unknown to a type checker.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math

import numpy as np
from numba import carray, njit

from . import numba_tiles as tiles
from .numba_merge import write_row
from .numba_tiles import TILE, pointer, prefetch

_ZERO, _NO_LOGIT = np.float32(0), np.float32(-np.inf)
_ALL = 1 << 40  # elements behind an address: more than there are. Nobody asks for the end


@njit(nogil=True, cache=True)
def reduce_units(
    first, end, sizes, items, first_states, lens, addresses, strides, scales, table, softcap
):
    """Do the units first to end.

    Returns: -1, or the entry of block_tables that leaves the pool, and then the units aren't done

    Args:    sizes, addresses, strides: as `numba_backend` lists them, int64
             items: (items, 2), int64: sequence and partition
             first_states: (sequences,), int64
             lens: (sequences,), int64
             scales: (num_kv_heads, 2), float32: of logits, and of the result
             table: (256,), float32, as `numba_tiles.load` takes it
             softcap: 0: none
    """
    (
        kv_heads, group, q_len, lanes, block_size, partition, columns, longest, kind, wide_ids,
        k_piece, v_piece, window, causal, has_slopes, has_sinks, wants_lse, direct,
        num_blocks,
    ) = sizes  # fmt: skip
    (sq, si, sh, sd, skb, skh, skt, skp, skd, svb, svh, svt, svp, svd) = strides
    q_at, k_at, v_at, ids_at, _, _, states_at, slopes_at, _ = addresses
    query = carray(pointer(q_at), (_ALL,), np.float32)
    k_floats, v_floats = (
        carray(pointer(k_at), (_ALL,), np.float32), carray(pointer(v_at), (_ALL,), np.float32),
    )  # fmt: skip
    k_halves, v_halves = (
        carray(pointer(k_at), (_ALL,), np.uint16), carray(pointer(v_at), (_ALL,), np.uint16),
    )  # fmt: skip
    k_bytes, v_bytes = (
        carray(pointer(k_at), (_ALL,), np.uint8), carray(pointer(v_at), (_ALL,), np.uint8),
    )  # fmt: skip
    narrow = carray(pointer(ids_at), (_ALL,), np.int32)
    wide = carray(pointer(ids_at), (_ALL,), np.int64)
    states = carray(pointer(states_at), (_ALL,), np.float32)
    slopes = carray(pointer(slopes_at), (_ALL,), np.float32)
    cap = np.float32(softcap)

    rows = group * q_len
    q, acc = np.empty((rows, lanes), np.float32), np.empty((rows, lanes), np.float32)
    m, s = np.empty(rows, np.float32), np.empty(rows, np.float32)
    logits, bits = np.empty((rows, TILE), np.float32), np.empty(TILE, np.int32)
    seen = np.empty((rows, 2), np.int64)  # the tile's tokens that a row sees
    k_places, v_places = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    k_tile = np.empty(0 if direct else TILE * lanes, np.uint32)
    v_tile = np.empty(0 if direct else TILE * lanes, np.uint32)
    packed = np.arange(TILE) * lanes  # places of tokens in a tile that was copied
    k_all = k_floats if direct else k_tile.view(np.float32)
    v_all = v_floats if direct else v_tile.view(np.float32)

    for unit in range(first, end):
        item, head = unit // kv_heads, unit % kv_heads
        seq, part = items[item, 0], items[item, 1]
        length = lens[seq]
        start = 0
        if window > 0:
            start = max(0, length - (window + q_len - 1)) // block_size * block_size
        num_parts = max(1, -(-(length - start) // partition))
        if part >= num_parts or length > longest:
            continue
        begin = start + part * partition
        finish = min(length, begin + partition)
        for r in range(rows):
            row_at = seq * sq + (r % q_len) * si + (head * group + r // q_len) * sh
            for d in range(lanes):
                q[r, d] = query[row_at + d * sd] * scales[head, 0]
                acc[r, d] = _ZERO
            m[r], s[r] = _NO_LOGIT, _ZERO
        for tile in range(begin, finish, TILE):
            n = min(TILE, finish - tile)
            low, high = n, 0  # what any row sees
            for r in range(rows):
                position = length - q_len + r % q_len if causal else length - 1
                a, b = 0, min(n, position + 1 - tile)
                if window > 0:
                    a = max(0, position + 1 - window - tile)
                seen[r, 0], seen[r, 1] = a, max(a, b)
                if a < b:
                    low, high = min(low, a), max(high, b)
            if low >= high:
                continue
            for t in range(low, high):
                column, slot = (tile + t) // block_size, (tile + t) % block_size
                entry = seq * columns + column
                block = wide[entry] if wide_ids else np.int64(narrow[entry])
                if block < 0 or block >= num_blocks:
                    return entry
                k_places[t] = block * skb + head * skh + slot * skt
                v_places[t] = block * svb + head * svh + slot * svt
                if not direct:
                    tiles.load(kind, k_floats, k_halves, k_bytes, table, k_places[t], k_piece,
                               skp, skd, lanes, k_tile, t * lanes)  # fmt: skip
                    tiles.load(kind, v_floats, v_halves, v_bytes, table, v_places[t], v_piece,
                               svp, svd, lanes, v_tile, t * lanes)  # fmt: skip
            ks, vs = (k_places, v_places) if direct else (packed, packed)
            for r in range(rows):
                if direct:  # a row's share of the tile's values
                    for t in range(
                        low + r * (high - low) // rows, low + (r + 1) * (high - low) // rows
                    ):
                        for d in range(0, lanes, 16):
                            prefetch(v_at + 4 * (v_places[t] + d))
                _dots(r, rows, seen, q, k_all, ks, lanes, logits)
                a, b = seen[r]
                x = logits[r]
                if cap > _ZERO:
                    for t in range(a, b):
                        x[t] = cap * np.float32(math.tanh(x[t] / cap))
                if has_slopes:
                    slope = slopes[head * group + r // q_len]
                    position = length - q_len + r % q_len
                    for t in range(a, b):
                        x[t] -= slope * np.float32(position - tile - t)
                top = tiles.largest(x, a, b, m[r])
                if top > m[r]:
                    if s[r] != _ZERO:
                        factor = np.float32(math.exp(m[r] - top))
                        s[r] *= factor
                        mine = acc[r]
                        for d in range(lanes):
                            mine[d] *= factor
                    m[r] = top
                # Where there was no logit yet but -inf or NaN, these become 0 and NaN.
                tiles.exponentials(x, a, b, _ZERO if top == _NO_LOGIT else top, bits)
                s[r] += tiles.total(x, a, b)
            for r in range(rows):
                _add_values(r, rows, seen, logits, v_all, vs, lanes, acc)
        if num_parts == 1:
            for r in range(rows):
                write_row(acc[r], s[r], m[r], seq, head, r, sizes, addresses, scales)
        else:
            place = ((first_states[seq] + part) * kv_heads + head) * rows * (lanes + 2)
            for r in range(rows):
                for d in range(lanes):
                    states[place + d] = acc[r, d]
                states[place + lanes], states[place + lanes + 1] = s[r], m[r]
                place += lanes + 2
    return -1


@njit
def _is_first_of_two(r, rows, seen):
    """Whether row r and the next one see the same tokens of the tile, and r is even."""
    return (
        r % 2 == 0
        and r + 1 < rows
        and seen[r + 1, 0] == seen[r, 0]
        and seen[r + 1, 1] == seen[r, 1]
    )


@njit
def _dots(r, rows, seen, q, k, at, lanes, logits):
    """A row's logits of the tile, and the next row's where two are worked on together."""
    t, end = seen[r]
    if _is_first_of_two(r, rows, seen):
        while t + 4 <= end:
            tiles.dots_of_two(q[r], q[r + 1], k, at, t, lanes, logits[r], logits[r + 1])
            t += 4
    elif r > 0 and _is_first_of_two(r - 1, rows, seen):
        t += (end - t) // 4 * 4  # done with the row before
    else:
        while t + 4 <= end:
            tiles.dots_of_one(q[r], k, at, t, lanes, logits[r])
            t += 4
    while t < end:
        tiles.dot(q[r], k, at, t, lanes, logits[r])
        t += 1


@njit
def _add_values(r, rows, seen, weights, v, at, lanes, acc):
    """Add the tile's values to a row's sum, and to the next row's likewise."""
    t, end = seen[r]
    if _is_first_of_two(r, rows, seen):
        while t + 3 <= end:
            tiles.add_of_two(weights[r], weights[r + 1], v, at, t, lanes, acc[r], acc[r + 1])
            t += 3
    elif r > 0 and _is_first_of_two(r - 1, rows, seen):
        t += (end - t) // 3 * 3  # done with the row before
    else:
        while t + 4 <= end:
            tiles.add_of_one(weights[r], v, at, t, lanes, acc[r])
            t += 4
    while t < end:
        tiles.add(weights[r], v, at, t, lanes, acc[r])
        t += 1
