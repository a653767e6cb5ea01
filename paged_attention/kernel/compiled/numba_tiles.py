"""What the compiled pass does with one tile of at most 32 tokens, each for one row or two.

Loops over lanes are written so that LLVM turns them into vector instructions. Several tokens share
one loop, because then each lane of the query, or of the sum, is loaded once for all of them.

Every sum is taken in an order that depends on the tile alone, so a row's bits are the same in any
batch and with any number of threads.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 32  # tokens
FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = range(4)  # what a cache holds

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
# A sum of products in any order, but fixed when compiled. NaN and infinity keep their meaning.
_SUM = {"reassoc", "contract", "nsz"}
_FUSED = {"contract"}


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer, for `carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address. It changes nothing and can't fail."""

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [place, i32(0), i32(3), i32(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(address), codegen


@njit(fastmath=_SUM)
def dots_of_two(q, p, k, at, t, lanes, out_q, out_p):
    """Two rows times tokens t to t + 3: out_q[t + i] = q . k[at[t + i]], and out_p likewise."""
    k0, k1 = k[at[t] : at[t] + lanes], k[at[t + 1] : at[t + 1] + lanes]
    k2, k3 = k[at[t + 2] : at[t + 2] + lanes], k[at[t + 3] : at[t + 3] + lanes]
    q0 = q1 = q2 = q3 = p0 = p1 = p2 = p3 = _ZERO
    for d in range(lanes):
        x, y, a, b, c, e = q[d], p[d], k0[d], k1[d], k2[d], k3[d]
        q0 += x * a
        q1 += x * b
        q2 += x * c
        q3 += x * e
        p0 += y * a
        p1 += y * b
        p2 += y * c
        p3 += y * e
    out_q[t], out_q[t + 1], out_q[t + 2], out_q[t + 3] = q0, q1, q2, q3
    out_p[t], out_p[t + 1], out_p[t + 2], out_p[t + 3] = p0, p1, p2, p3


@njit(fastmath=_SUM)
def dots_of_one(q, k, at, t, lanes, out):
    """One row times tokens t to t + 3."""
    k0, k1 = k[at[t] : at[t] + lanes], k[at[t + 1] : at[t + 1] + lanes]
    k2, k3 = k[at[t + 2] : at[t + 2] + lanes], k[at[t + 3] : at[t + 3] + lanes]
    s0 = s1 = s2 = s3 = _ZERO
    for d in range(lanes):
        x = q[d]
        s0 += x * k0[d]
        s1 += x * k1[d]
        s2 += x * k2[d]
        s3 += x * k3[d]
    out[t], out[t + 1], out[t + 2], out[t + 3] = s0, s1, s2, s3


@njit(fastmath=_SUM)
def dot(q, k, at, t, lanes, out):
    """One row times token t."""
    one, total = k[at[t] : at[t] + lanes], _ZERO
    for d in range(lanes):
        total += q[d] * one[d]
    out[t] = total


@njit(fastmath=_FUSED)
def add_of_two(w, x, v, at, t, lanes, acc, acc_x):
    """Two rows: acc += the values of tokens t to t + 2, with weights w, and acc_x with x."""
    v0, v1 = v[at[t] : at[t] + lanes], v[at[t + 1] : at[t + 1] + lanes]
    v2 = v[at[t + 2] : at[t + 2] + lanes]
    w0, w1, w2, x0, x1, x2 = w[t], w[t + 1], w[t + 2], x[t], x[t + 1], x[t + 2]
    for d in range(lanes):
        a, b, c = v0[d], v1[d], v2[d]
        acc[d] = acc[d] + w0 * a + w1 * b + w2 * c
        acc_x[d] = acc_x[d] + x0 * a + x1 * b + x2 * c


@njit(fastmath=_FUSED)
def add_of_one(w, v, at, t, lanes, acc):
    """One row: acc += the values of tokens t to t + 3, with weights w."""
    v0, v1 = v[at[t] : at[t] + lanes], v[at[t + 1] : at[t + 1] + lanes]
    v2, v3 = v[at[t + 2] : at[t + 2] + lanes], v[at[t + 3] : at[t + 3] + lanes]
    w0, w1, w2, w3 = w[t], w[t + 1], w[t + 2], w[t + 3]
    for d in range(lanes):
        acc[d] = acc[d] + w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@njit(fastmath=_FUSED)
def add(w, v, at, t, lanes, acc):
    """One row: acc += the value of token t, with its weight."""
    one, weight = v[at[t] : at[t] + lanes], w[t]
    for d in range(lanes):
        acc[d] += weight * one[d]


@njit
def largest(x, first, end, start):
    """The largest of start and x[first:end]. NaN is passed over: its weight will be NaN."""
    a, b, t = start, start, first
    while t + 1 < end:
        a = x[t] if x[t] > a else a
        b = x[t + 1] if x[t + 1] > b else b
        t += 2
    if t < end:
        a = x[t] if x[t] > a else a
    return b if b > a else a


# e^r for |r| <= ln(2) / 2, as Cephes' expf has it; error below 1 unit in the last place.
_LOG2_E, _LN2_HIGH, _LN2_LOW = (
    np.float32(x) for x in (1.4426950408889634, 0.693359375, -2.12194440e-4)
)
_P0, _P1, _P2, _P3, _P4, _P5 = (
    np.float32(x)
    for x in (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1, 0.5)
)
_LEAST = np.float32(-87)  # below, the weight is 0: less than 1e-37 of the largest
_BIAS, _MANTISSA = np.int32(127), np.int32(23)


@njit(fastmath=_FUSED)
def exponentials(x, first, end, largest, bits):
    """x[first:end] = e^(x - largest), for numbers that are no larger.

    Args:    bits: (TILE,), int32, overwritten
    """
    powers = bits.view(np.float32)
    for t in range(first, end):
        y = x[t] - largest
        is_small = y < _LEAST  # False for NaN, which stays NaN
        y = _ZERO if is_small else y
        n = np.floor(y * _LOG2_E + _HALF)
        r = y - n * _LN2_HIGH - n * _LN2_LOW
        p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
        p = p * r * r + r + _ONE
        x[t] = _ZERO if is_small else p
        bits[t] = (np.int32(n) + _BIAS) << _MANTISSA  # 2^n
    for t in range(first, end):
        x[t] *= powers[t]


@njit(fastmath=_SUM)
def total(x, first, end):
    """The sum of x[first:end]."""
    result = _ZERO
    for t in range(first, end):
        result += x[t]
    return result


@njit
def load(kind, floats, halves, bytes_, table, start, piece, to_piece, to_lane, lanes, out, place):
    """One token's lanes, wherever they lie, as float32: out[place + d].

    Args:    kind: FLOAT32, ... of the cache, which is given in three widths
             table: (256,), float32, what a byte of an fp8 cache means
             start: the element at which the token begins
             piece: lanes that lie to_lane apart. The next piece begins to_piece later
             out: (TILE * lanes,), uint32: bits
    """
    as_floats, d = out.view(np.float32), place
    for p in range(lanes // piece):
        at = start + p * to_piece
        if kind == FLOAT32:
            for e in range(piece):
                as_floats[d + e] = floats[at + e * to_lane]
        elif kind == BFLOAT16:
            for e in range(piece):
                out[d + e] = np.uint32(halves[at + e * to_lane]) << np.uint32(16)
        elif kind == FLOAT16:
            for e in range(piece):
                half = np.uint32(halves[at + e * to_lane])
                sign = (half & np.uint32(0x8000)) << np.uint32(16)
                out[d + e] = sign | ((half & np.uint32(0x7FFF)) << np.uint32(13))
        else:
            for e in range(piece):
                as_floats[d + e] = table[bytes_[at + e * to_lane]]
        d += piece
    if kind == FLOAT16:  # its exponents are biased by 15, and not by 127
        _scale_halves(out, as_floats, place, lanes)


_EXPONENT, _LARGEST_HALF = np.uint32(0x7F800000), np.uint32(0x0F800000)
_BIASES = np.float32(2.0**112)


@njit
def _scale_halves(out, as_floats, place, lanes):
    rare = np.uint32(0)
    for d in range(place, place + lanes):
        is_rare = (out[d] & _LARGEST_HALF) == _LARGEST_HALF  # infinity or NaN
        rare |= np.uint32(1) if is_rare else np.uint32(0)
    if not rare:
        for d in range(place, place + lanes):
            as_floats[d] *= _BIASES
        return
    for d in range(place, place + lanes):
        if (out[d] & _LARGEST_HALF) == _LARGEST_HALF:
            out[d] |= _EXPONENT
        else:
            as_floats[d] *= _BIASES
