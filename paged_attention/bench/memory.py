"""What fits a machine's memory: the longest context whose stages can be measured there."""

from __future__ import annotations

import functools

from paged_attention.bench.peers import ours_and_sdpa as peers
from paged_attention.bench.settings import Settings
from paged_attention.cost.predict import predict
from paged_attention.measure.counting import count
from paged_attention.measure.profiles import profile_of

USABLE = 0.8  # of the available memory: kernels make copies that can't be counted


@functools.cache
def needed_bytes(settings: Settings, seq_lens: tuple[int, ...]) -> tuple[int, str]:
    """Memory that measuring a batch of these lengths takes, by the cost model and, for peers, by
    counting on meta tensors.

    Returns: bytes: the caches, the floor's copy of them, the copies that peers keep, and the
                   largest of what a stage or a peer allocates at once; a peer that will be skipped
                   counts, too: that shows only when it is tried
             the stage or peer that is largest
    """
    peaks = {"the check": 48 * sum(seq_lens) * settings.head_size}  # one KV head in float64
    for name in settings.stages:
        peaks[name] = _peak(settings, name, seq_lens)
    inputs = settings.inputs(seq_lens, device="meta")
    caches = inputs.key_cache.nbytes + inputs.value_cache.nbytes  # whole blocks, and a spare one
    kept = caches + settings.kv_bytes(sum(seq_lens))
    if settings.peers:
        inputs = inputs._replace(block_tables=inputs.block_tables.to("meta"))
        data = peers.Data(inputs, settings.scale)
        kept += caches  # the one in HND
        for name in settings.peers:
            peer = peers.PEERS[name]
            kept += peer.copies * caches
            if peer.layout is None:
                peak = _peer_peak(name, data)
            else:
                peak = _peak(settings, "paged_attention", seq_lens, peer.layout)
            peaks[name] = max(peer.making * caches, peak)
    largest = max(peaks, key=peaks.get)
    return kept + peaks[largest], largest


def _peak(settings: Settings, name: str, seq_lens: tuple[int, ...], layout: str = "vllm") -> int:
    """Bytes that one call of a stage, or a first one of the kernel, allocates at once."""
    profile = profile_of(settings.device)
    known = None if None in (profile.bandwidth, profile.op_cost) else profile
    return predict(name, settings.shape(name, seq_lens, layout), known).temporary_bytes


def _peer_peak(name: str, data: peers.Data) -> int:
    """Likewise, of what isn't ours. On meta tensors `scaled_dot_product_attention` copies K and V
    for every query head, as PyTorch does on the devices where nothing better fits."""
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
            and needed_bytes(settings, (context,))[0] <= usable
        )

    if fits(longest):
        return longest
    low, high = 0, -(-longest // 1000)  # thousands: low fits, high doesn't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(1000 * middle) else (low, middle)
    return 1000 * low
