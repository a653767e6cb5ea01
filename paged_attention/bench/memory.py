"""What fits a machine's memory: how much a step needs, and which contexts a run measures."""

from __future__ import annotations

import bisect
import functools
import sys

from paged_attention.bench.peers import PEERS, Batch, Unavailable, make
from paged_attention.bench.settings import Settings
from paged_attention.cost.predict import predict
from paged_attention.measure.counting import count
from paged_attention.measure.machine import available_bytes
from paged_attention.measure.profiles import profile_of
from paged_attention.measure.units import human_bytes, listed

LENGTHS = 1024, 8192, 32_768, 100_000  # contexts where none is asked for
SHORT, LONGEST = LENGTHS[0], LENGTHS[-1]
_USABLE = 0.8  # of the free memory, because kernels make copies that can't be counted


def usable_bytes(device: str) -> int:
    """Memory that a run may take."""
    return int(_USABLE * available_bytes(device))


@functools.cache
def needed_bytes(settings: Settings, seq_lens: tuple[int, ...]) -> tuple[int, str]:
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
    settings: Settings, name: str, seq_lens: tuple[int, ...], layout: str = "vllm"
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


def longest_context(settings: Settings, usable: int, longest: int) -> int:
    """The longest context up to `longest` that fits `usable` bytes.

    Returns: tokens: `longest`, or whole thousands; 0 if less than a thousand fits
    """

    def too_long(context: int) -> bool:
        # K and V alone come first, because a table of a billion blocks is slow on meta, too.
        if 2 * settings.kv_bytes(context) > usable:
            return True
        return needed_bytes(settings, (context,))[0] > usable

    if not too_long(longest):
        return longest
    shorter = range(1000, longest, 1000)
    return 1000 * bisect.bisect_left(shorter, True, key=too_long)


def contexts_that_fit(settings: Settings) -> list[int]:
    """The default's contexts, or as far as they fit. Prints which, and why.

    Raises:  ValueError: not even the shortest fits
    """
    usable = usable_bytes(settings.device)
    print(f"Counting what {LONGEST:,} tokens need", file=sys.stderr, flush=True)
    longest = max(longest_context(settings, usable, length) for length in (LONGEST, SHORT))
    if not longest:
        needed = _in_words(settings, SHORT)
        raise ValueError(f"--context {SHORT} needs {needed}; {_free(usable)}: pass a shorter one")
    between = [length for length in LENGTHS if 2 * length <= longest]
    contexts = sorted({min(SHORT, longest), *between, longest})
    needed = _in_words(settings, longest)
    line = f"Contexts: {listed(contexts)} tokens; the longest needs {needed}; {_free(usable)}"
    if longest < LONGEST:
        needed_by_longest, _ = needed_bytes(settings, (LONGEST,))
        line += f"; {LONGEST:,} would need {human_bytes(needed_by_longest)}"
    print(line + ".", flush=True)
    return contexts


def require_that_they_fit(settings: Settings, contexts: list[int]) -> None:
    """Raise ValueError for the first of these contexts that the memory can't hold."""
    usable = usable_bytes(settings.device)
    for context in contexts:
        at_least = 2 * settings.kv_bytes(context)
        if at_least > usable:
            raise ValueError(
                f"--context {context} needs more than {human_bytes(at_least)} "
                f"for K and V and the floor's copy; {_free(usable)}"
            )
        if needed_bytes(settings, (context,))[0] > usable:
            needed = _in_words(settings, context)
            raise ValueError(f"--context {context} needs {needed}; {_free(usable)}")


def _in_words(settings: Settings, context: int) -> str:
    needed, largest = needed_bytes(settings, (context,))
    return f"{human_bytes(needed)}, most of it for {largest}"


def _free(usable: int) -> str:
    return f"{human_bytes(usable)} usable ({_USABLE:.0%} of what is free)"
