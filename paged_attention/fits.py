"""What fits a machine's memory: the longest context whose stages can be measured there."""

from __future__ import annotations

import functools

from .counting import count
from .ladder import Settings, rung

USABLE = 0.8  # of the available memory: kernels make copies that can't be counted


@functools.cache
def needed_bytes(settings: Settings, context: int) -> tuple[int, str]:
    """Memory that measuring at `context` tokens takes, by counting on meta tensors.

    Returns: bytes: the caches, the floor's copy of them, and the largest of what the stages
                   allocate at once
             the stage that is largest
    """
    peaks = {"the check": 48 * context * settings.head_size}  # float64 copies of one KV head
    for name in settings.stages:
        inputs = settings.inputs(context, device="meta")
        if name == "paged_attention":  # takes a table beside the caches only
            inputs = inputs._replace(block_tables=inputs.block_tables.to("meta"))
        peaks[name] = count(rung(name, inputs, settings, validate=False)).peak_bytes
    largest = max(peaks, key=peaks.get)
    caches = inputs.key_cache.nbytes + inputs.value_cache.nbytes  # whole blocks, and a spare one
    return caches + settings.kv_bytes(context) + peaks[largest], largest


def longest_context(settings: Settings, usable: int, longest: int) -> int:
    """The longest context up to `longest` that fits `usable` bytes: in whole thousands, if not
    `longest` itself; 0 if less than a thousand fits."""

    def fits(context):
        # Without a stage counted, first: a table of a billion blocks is no fun on meta either.
        return (
            2 * settings.kv_bytes(context) <= usable
            and needed_bytes(settings, context)[0] <= usable
        )

    if fits(longest):
        return longest
    low, high = 0, -(-longest // 1000)  # thousands: low fits, high doesn't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(1000 * middle) else (low, middle)
    return 1000 * low
