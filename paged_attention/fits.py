"""What fits a machine's memory: the longest context whose stages can be measured there."""

from __future__ import annotations

import functools

from . import peers
from .counting import count
from .ladder import Settings, rung

USABLE = 0.8  # of the available memory: kernels make copies that can't be counted


@functools.cache
def needed_bytes(settings: Settings, context: int) -> tuple[int, str]:
    """Memory that measuring at `context` tokens takes, by counting on meta tensors.

    Returns: bytes: the caches, the floor's copy of them, the copies that peers keep, and the
                   largest of what a stage or a peer allocates at once; a peer that will be skipped
                   counts, too: that shows only when it is tried
             the stage or peer that is largest
    """
    peaks = {"the check": 48 * context * settings.head_size}  # float64 copies of one KV head
    for name in settings.stages:
        inputs = settings.inputs(context, device="meta")
        if name == "paged_attention":  # takes a table beside the caches only
            inputs = inputs._replace(block_tables=inputs.block_tables.to("meta"))
        peaks[name] = count(rung(name, inputs, settings, validate=False)).peak_bytes
    inputs = settings.inputs(context, device="meta")
    caches = inputs.key_cache.nbytes + inputs.value_cache.nbytes  # whole blocks, and a spare one
    kept = caches + settings.kv_bytes(context)
    if settings.peers:
        inputs = inputs._replace(block_tables=inputs.block_tables.to("meta"))
        data = peers.Data(inputs, settings.scale, settings.partition_size)
        kept += caches  # the one in HND
        for name in settings.peers:
            kept += peers.PEERS[name].copies * caches
            peaks[name] = max(peers.PEERS[name].making * caches, _peer_peak(name, data))
    largest = max(peaks, key=peaks.get)
    return kept + peaks[largest], largest


def _peer_peak(name: str, data: peers.Data) -> int:
    """Bytes that one call allocates at once. On meta tensors `scaled_dot_product_attention` copies
    K and V for every query head, as PyTorch does on the devices where nothing better fits."""
    if peers.PEERS[name].compiled:
        return 0
    try:
        call, _ = peers.make(name, data)
    except peers.Unavailable:
        return 0
    return count(call).peak_bytes


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
