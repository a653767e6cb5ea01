"""How else one could decode over the same cache, to be timed beside the ladder.

Each peer is one function: it takes the ladder's data and lays it out as it needs it, untimed, and
returns the call that is timed, and a note on it. A peer that can't run here raises `Unavailable`,
which says why.

    paged_attention_HND, paged_attention_NHD   our own kernel, in the two plain layouts
    gather_sdpa     what plain PyTorch offers: gather the blocks, then attend
    dense_sdpa      the same without a paged cache: what paging costs
    flex_paged      PyTorch's own paging, compiled
    vllm_cpu_op     vLLM's compiled kernel for CPUs, where the package vllm-cpu is installed
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from paged_attention.bench.peers import flex as flex_paged
from paged_attention.bench.peers import vllm_cpu
from paged_attention.inputs import Inputs, pack, unpack
from paged_attention.kernel.decode import paged_attention
from paged_attention.kernel.partition import ceil_div
from paged_attention.kernel.workspace import Workspace
from paged_attention.measure.counting import count


class Unavailable(Exception):
    """This peer can't run here; the message is the reason, in a few words."""


class Sequence(NamedTuple):
    """One of a batch's sequences."""

    query: torch.Tensor  # (1, num_heads, head_size)
    block_ids: torch.Tensor  # (blocks,), int32
    num_tokens: int


class Data:
    """A batch, as every peer gets it: the same values, blocks in the same order.

    Args: inputs: in the "vllm" layout, as `inputs.random_inputs` makes them
          scale: float, multiplies the logits
    """

    def __init__(self, inputs: Inputs, scale: float) -> None:
        self.inputs, self.scale = inputs, scale
        # K and V, (num_blocks, num_kv_heads, block_size, head_size); unused slots NaN
        self.hnd = pack(*unpack(inputs.key_cache, inputs.value_cache, "vllm"), "HND")
        self.block_size = inputs.value_cache.shape[-1]
        self.sequences = [
            Sequence(query[None], table[: ceil_div(num_tokens, self.block_size)], num_tokens)
            for query, table, num_tokens in zip(
                inputs.query, inputs.block_tables, inputs.seq_lens.tolist()
            )
        ]

    @property
    def only(self) -> Sequence:
        """The one sequence, for peers that take no more. Raises Unavailable if there are more."""
        if len(self.sequences) != 1:
            raise Unavailable(f"takes one sequence, not {len(self.sequences)}")
        return self.sequences[0]

    def gather(self, sequence: Sequence) -> list[torch.Tensor]:
        """Its K and V, contiguous per head, (1, num_kv_heads, num_tokens, head_size)."""
        return [
            cache.index_select(0, sequence.block_ids)  # (blocks, kv_heads, block_size, head_size)
            .transpose(0, 1)
            .flatten(1, 2)[None, :, : sequence.num_tokens]
            for cache in self.hnd
        ]


Call = Callable[[], torch.Tensor]  # -> (num_seqs, num_heads, head_size)


class KernelCall:
    """A call of our kernel, as any user's but that its workspace is its own: the memory that it
    keeps between calls and that counts beside what a call allocates."""

    def __init__(self, inputs: Inputs, **options) -> None:
        self.workspace = Workspace()
        self.inputs, self.options = inputs, options

    def __call__(self) -> torch.Tensor:
        return paged_attention(*self.inputs, workspace=self.workspace, **self.options)

    def first_peak(self) -> int:
        """Bytes that a first call allocates at once, the workspace among them."""
        self.workspace.clear()
        return count(self).peak_bytes


def paged_attention_hnd(data: Data) -> tuple[Call, str]:
    """Our kernel in its best layout."""
    return _own(data, data.hnd, "HND"), ""


def paged_attention_nhd(data: Data) -> tuple[Call, str]:
    """Our kernel on a cache whose blocks hold whole tokens."""
    return _own(data, pack(*unpack(*data.hnd, "HND"), "NHD"), "NHD"), ""


def _own(data: Data, caches, layout: str) -> Call:
    inputs = data.inputs._replace(key_cache=caches[0], value_cache=caches[1])
    return KernelCall(inputs, layout=layout, scale=data.scale)


def gather_sdpa(data: Data) -> tuple[Call, str]:
    """Fetch a sequence's blocks, put heads first, attend; then the next sequence's. index_select
    and one reordering copy are the fastest of the ways to gather that were tried (advanced
    indexing, index_select along the second dimension)."""
    _need_gqa()
    return lambda: torch.cat([_sdpa(data, s, *data.gather(s)) for s in data.sequences]), ""


def dense_sdpa(data: Data) -> tuple[Call, str]:
    """Attend to keys and values that lie in order already: no paging, and no copy timed."""
    sequence = data.only
    _need_gqa()
    key, value = (tokens.contiguous() for tokens in data.gather(sequence))
    return lambda: _sdpa(data, sequence, key, value), ""


def _sdpa(data: Data, sequence: Sequence, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query = sequence.query[:, :, None]  # (1, num_heads, 1, head_size)
    out = functional.scaled_dot_product_attention(
        query, key, value, scale=data.scale, enable_gqa=True
    )
    return out[:, :, 0]


def _need_gqa() -> None:
    one = torch.zeros(1, 1, 1, 1)
    try:
        functional.scaled_dot_product_attention(one, one, one, enable_gqa=True)
    except TypeError:
        raise Unavailable("SDPA has enable_gqa from torch 2.5 on") from None


def flex_attention(data: Data) -> tuple[Call, str]:
    """FlexAttention over PyTorch's PagedAttention, compiled; its pages are the ladder's blocks."""
    sequence = data.only
    try:
        return flex_paged.decode_call(
            *(sequence.query, *data.gather(sequence), sequence.block_ids),
            *(len(data.hnd[0]), data.block_size, data.scale),
        )
    except flex_paged.Missing as missing:
        raise Unavailable(str(missing)) from None


def vllm_cpu_op(data: Data) -> tuple[Call, str]:
    """vLLM's compiled operation, on a cache that its own operation has filled."""
    gathered = zip(*map(data.gather, data.sequences))
    key, value = (torch.cat([k[0] for k in tokens], dim=1).transpose(0, 1) for tokens in gathered)
    inputs = data.inputs
    try:
        return vllm_cpu.decode_call(
            *(inputs.query, key, value, inputs.block_tables, inputs.seq_lens),
            *(len(data.hnd[0]), data.block_size, data.scale),
        )
    except vllm_cpu.Missing as missing:
        raise Unavailable(str(missing)) from None


class Peer(NamedTuple):
    """make:     Data -> (the call that is timed, a note)
    copies:   of the whole cache that it keeps, beside the HND one that all share
    making:   of K and V that making it takes for a while
    compiled: what it does is inside compiled code: there are no operations to count
    layout:   of our own kernel's caches
    """

    make: Callable[[Data], tuple[Call, str]]
    copies: int
    making: int
    compiled: bool = False
    layout: str | None = None


PEERS = {
    "paged_attention_HND": Peer(paged_attention_hnd, copies=0, making=1, layout="HND"),
    "paged_attention_NHD": Peer(paged_attention_nhd, copies=1, making=0, layout="NHD"),
    "gather_sdpa": Peer(gather_sdpa, copies=0, making=0),
    "dense_sdpa": Peer(dense_sdpa, copies=1, making=1),
    "flex_paged": Peer(flex_attention, copies=1, making=3, compiled=True),
    "vllm_cpu_op": Peer(vllm_cpu_op, copies=1, making=3, compiled=True),
}


def make(name: str, data: Data) -> tuple[Call, str]:
    """The named peer's call, and a note on it.

    Raises: Unavailable: with the reason, whatever it was. KeyError: no such peer
    """
    peer = PEERS[name]
    try:
        return peer.make(data)
    except Unavailable:
        raise
    except Exception as error:  # a missing compiler, an unsupported size, no memory, ...
        raise Unavailable(reason_of(error)) from error


def reason_of(error: Exception, longest: int = 100) -> str:
    """The error's kind and first line; of a path its last part, as the JSON goes to others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    text = re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)*([^\s/'\"]*)", r"\1", text)
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."
