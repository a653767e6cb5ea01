"""What fits a machine's memory: how much measuring a step needs, and whether there is as much."""

from __future__ import annotations

from collections.abc import Sequence

from paged_attention.bench.peers import PEERS, Batch, Unavailable, make
from paged_attention.bench.settings import Settings
from paged_attention.cost.predict import predict
from paged_attention.measure.counting import count
from paged_attention.measure.machine import available_bytes
from paged_attention.measure.profiles import profile_of
from paged_attention.measure.units import human_bytes

_USABLE = 0.8  # of the free memory, because kernels make copies that can't be counted


def too_large(settings: Settings, seq_lens: Sequence[int]) -> str | None:
    """Why a step can't be measured here, in words that follow its name; None if it can.

    Example:
        >>> too_large(Settings(), [10**12])
        "needs more than 16384 TB for K and V and the floor's copy; ...
    """
    usable = int(_USABLE * available_bytes(settings.device))
    free = f"{human_bytes(usable)} usable ({_USABLE:.0%} of what is free)"
    # K and V alone come first, because a table of a billion blocks is slow on meta, too.
    at_least = 2 * settings.kv_bytes(sum(seq_lens))
    if at_least > usable:
        return f"needs more than {human_bytes(at_least)} for K and V and the floor's copy; {free}"
    needed, largest = needed_bytes(settings, seq_lens)
    if needed > usable:
        return f"needs {human_bytes(needed)}, most of it for {largest}; {free}"
    return None


def needed_bytes(settings: Settings, seq_lens: Sequence[int]) -> tuple[int, str]:
    """Memory that measuring a step takes: by the cost model, and for peers by counting.

    Returns: bytes: the caches, the floor's copy of them, the copies that peers keep, and the
                   largest of what a contender allocates at once. A peer that will be skipped
                   counts, too, because that shows only when it is tried
             the name of the contender that is largest
    """
    peaks = {"the check": 48 * sum(seq_lens) * settings.head_size}  # one KV head in float64
    for name in settings.stages:
        peaks[name] = _predicted_peak(settings, name, seq_lens)
    inputs = settings.inputs(seq_lens, device="meta")
    caches = inputs.key_cache.nbytes + inputs.value_cache.nbytes  # whole blocks, and a spare one
    kept = caches + settings.kv_bytes(sum(seq_lens))
    if settings.peers:
        kept += caches  # in HND, for all peers
        on_meta = inputs._replace(block_tables=inputs.block_tables.to("meta"))
        batch = Batch(on_meta, settings.scale)
        for name in settings.peers:
            peer = PEERS[name]
            kept += peer.kept * caches
            if peer.layout is None:
                peak = 0 if peer.compiled else _counted_peak(name, batch)
            else:
                peak = _predicted_peak(settings, "paged_attention", seq_lens, peer.layout)
            peaks[name] = max(peer.making * caches, peak)
    largest = max(peaks, key=lambda name: peaks[name])
    return kept + peaks[largest], largest


def _predicted_peak(
    settings: Settings, name: str, seq_lens: Sequence[int], layout: str = "vllm"
) -> int:
    """Bytes that one call of a stage, or a first call of the kernel, allocates at once."""
    profile = profile_of(settings.device)
    known = None if None in (profile.bandwidth, profile.op_cost) else profile
    return predict(name, settings.shape(name, seq_lens, layout), known).temporary_bytes


def _counted_peak(name: str, batch: Batch) -> int:
    """The same of a peer, on meta tensors.

    There `scaled_dot_product_attention` copies K and V for every query head, as PyTorch does on
    devices that have nothing better.
    """
    try:
        call, _ = make(name, batch)
    except Unavailable:
        return 0
    return count(call).peak_bytes
