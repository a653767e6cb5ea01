"""How else one could decode over the same cache: peers, to be timed beside the ladder.

A peer is a function of the ladder's batch. It lays the data out as it needs it, which isn't timed,
and returns the call that is timed, with a note on it. A peer that can't run here raises
`Unavailable`.

    paged_attention_HND, paged_attention_NHD   our own kernel, in the two plain layouts
    paged_attention_numba                      the same call, compiled for a CPU, in HND
    gather_sdpa     what plain PyTorch offers: gather the blocks, then attend
    dense_sdpa      the same without a paged cache: what paging costs
    flex_paged      PyTorch's own paging, compiled
    vllm_cpu_op     vLLM's compiled kernel for CPUs, where the package vllm-cpu is installed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paged_attention.bench.captions import reason_of
from paged_attention.bench.peers.data import Batch, Call, Unavailable
from paged_attention.bench.peers.flex import flex_paged
from paged_attention.bench.peers.ours import (
    paged_attention_hnd,
    paged_attention_nhd,
    paged_attention_numba,
)
from paged_attention.bench.peers.sdpa import dense_sdpa, gather_sdpa
from paged_attention.bench.peers.vllm_cpu import vllm_cpu_op

__all__ = ["PEERS", "Batch", "Call", "Peer", "Unavailable", "make"]


class Peer(NamedTuple):
    """How to make a peer, and what it needs. Copies are copies of the whole cache.

    make:     batch -> the call that is timed, a note
    kept:     copies that it keeps, beside the one in HND that all peers share
    making:   copies that making it takes for a while
    compiled: its work is inside compiled code, so that there are no operations to count
    layout:   of the caches, if it is our own kernel
    """

    make: Callable[[Batch], tuple[Call, str]]
    kept: int
    making: int
    compiled: bool = False
    layout: str | None = None


PEERS = {
    "paged_attention_HND": Peer(paged_attention_hnd, kept=0, making=1, layout="HND"),
    "paged_attention_NHD": Peer(paged_attention_nhd, kept=1, making=0, layout="NHD"),
    "paged_attention_numba": Peer(paged_attention_numba, kept=0, making=1, compiled=True),
    "gather_sdpa": Peer(gather_sdpa, kept=0, making=0),
    "dense_sdpa": Peer(dense_sdpa, kept=1, making=1),
    "flex_paged": Peer(flex_paged, kept=1, making=3, compiled=True),
    "vllm_cpu_op": Peer(vllm_cpu_op, kept=1, making=3, compiled=True),
}


def make(name: str, batch: Batch) -> tuple[Call, str]:
    """The call of a peer, and a note on it.

    Args:    name: one of PEERS
             batch: what it works on
    Raises:  Unavailable: it can't run here, whatever the error was
    """
    peer = PEERS[name]
    try:
        return peer.make(batch)
    except Unavailable:
        raise
    except Exception as error:  # a missing compiler, an unsupported size, no memory, ...
        raise Unavailable(reason_of(error)) from error
