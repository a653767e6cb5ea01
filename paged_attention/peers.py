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
import time
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional

from . import vllm_cpu
from .decode import paged_attention
from .inputs import Inputs
from .layouts import pack, unpack
from .time_limit import time_limit
from .workspace import Workspace

COMPILE_SECONDS = 120.0  # a compilation that takes longer is given up; on two cores it took 23


class Unavailable(Exception):
    """This peer can't run here; the message is the reason, in a few words."""


class Data:
    """One sequence, as every peer gets it: the same values, blocks in the same order.

    Args: inputs: of one sequence, in the "vllm" layout, as `inputs.random_inputs` makes them
          scale: float, multiplies the logits
          partition_size: tokens, for our own kernel
    Raises: ValueError: inputs hold another number of sequences than one
    """

    def __init__(self, inputs: Inputs, scale: float, partition_size: int) -> None:
        if len(inputs.query) != 1:
            raise ValueError(f"inputs hold {len(inputs.query)} sequences, peers take one")
        self.inputs = inputs
        self.query = inputs.query  # (1, num_heads, head_size)
        self.scale = scale
        self.partition_size = partition_size
        self.block_size = inputs.value_cache.shape[-1]
        self.num_tokens = int(inputs.seq_lens[0])
        num_blocks = -(-self.num_tokens // self.block_size)
        self.block_ids = inputs.block_tables[0, :num_blocks]

    @cached_property
    def hnd(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, (num_blocks, num_kv_heads, block_size, head_size); unused slots NaN."""
        return pack(*unpack(self.inputs.key_cache, self.inputs.value_cache, "vllm"), "HND")

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, contiguous per head, (1, num_kv_heads, num_tokens, head_size)."""
        key, value = self.hnd
        return self.tokens_of(key), self.tokens_of(value)

    def tokens_of(self, cache: torch.Tensor) -> torch.Tensor:
        """One of the two, (1, num_kv_heads, num_tokens, head_size), from its HND cache."""
        blocks = cache.index_select(0, self.block_ids)  # (blocks, kv_heads, block_size, head_size)
        return blocks.transpose(0, 1).flatten(1, 2)[None, :, : self.num_tokens]


Call = Callable[[], torch.Tensor]  # -> (1, num_heads, head_size)


class KernelCall:
    """A call of our kernel with a workspace of its own: the memory it keeps between calls, which
    counts beside what a call allocates."""

    def __init__(self, inputs: Inputs, **options) -> None:
        self.workspace = Workspace()
        self.inputs, self.options = inputs, options

    def __call__(self) -> torch.Tensor:
        return paged_attention(*self.inputs, workspace=self.workspace, **self.options)


def paged_attention_hnd(data: Data) -> tuple[Call, str]:
    """Our kernel in its best layout."""
    return _own(data, data.hnd, "HND"), ""


def paged_attention_nhd(data: Data) -> tuple[Call, str]:
    """Our kernel on a cache whose blocks hold whole tokens."""
    return _own(data, pack(*unpack(*data.hnd, "HND"), "NHD"), "NHD"), ""


def _own(data: Data, caches, layout: str) -> Call:
    inputs = data.inputs._replace(key_cache=caches[0], value_cache=caches[1])
    return KernelCall(
        inputs,
        layout=layout,
        scale=data.scale,
        partition_size=data.partition_size,
        validate=False,
    )


def gather_sdpa(data: Data) -> tuple[Call, str]:
    """Fetch the live blocks, put heads first, attend. index_select and one reordering copy are
    the fastest of the ways to gather that were tried (advanced indexing, index_select along the
    second dimension)."""
    _need_gqa()
    key, value = data.hnd  # made here, off the clock
    return (
        lambda: _sdpa(data, data.tokens_of(key), data.tokens_of(value)),
        "",
    )


def dense_sdpa(data: Data) -> tuple[Call, str]:
    """Attend to keys and values that lie in order already: no paging, and no copy timed."""
    _need_gqa()
    key, value = (tokens.contiguous() for tokens in data.gather())
    return lambda: _sdpa(data, key, value), ""


def _sdpa(data: Data, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query = data.query[:, :, None]  # (1, num_heads, 1, head_size)
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


def flex_paged(data: Data) -> tuple[Call, str]:
    """FlexAttention over PyTorch's PagedAttention, compiled for this one shape.

    Its pages are the ladder's blocks, in the same order. Unused slots hold zeros: it multiplies
    what they hold by 0, and NaN would stay.

    Source: torch.nn.attention.experimental._paged_attention (experimental by its own words)
    """
    try:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        raise Unavailable(f"torch {torch.__version__} has no PagedAttention") from None
    device, page = data.query.device, data.block_size
    tokens, num_pages = data.num_tokens, len(data.hnd[0])
    only = torch.zeros(1, dtype=torch.long, device=device)
    length = torch.tensor([tokens], device=device)

    pages = PagedAttention(num_pages, page, 1, device=str(device))
    pages.empty_pages = data.block_ids.tolist()  # those it takes, in this order
    pages.reserve(only, length)
    num_kv_heads, head_size = data.hnd[0].shape[1], data.hnd[0].shape[3]
    key, value = (
        data.query.new_zeros(1, num_kv_heads, num_pages * page, head_size) for _ in range(2)
    )
    pages.assign(only, torch.arange(tokens, device=device)[None], *data.gather(), key, value)
    mask = create_block_mask(
        lambda batch, head, row, token: token < tokens,
        *(1, None, 1, len(data.block_ids) * page),
        device=str(device),
        BLOCK_SIZE=(1, page),
    )
    mask = pages.convert_logical_block_mask(mask, kv_len=length)

    torch.compiler.reset()  # a context's code is no use to the next one
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    query = data.query[:, :, None]

    def call():
        with _uncounted():
            out = compiled(query, key, value, block_mask=mask, scale=data.scale, enable_gqa=True)
        return out[:, :, 0]

    start = time.perf_counter()
    with time_limit(COMPILE_SECONDS):
        call()
    return call, f"compiled in {time.perf_counter() - start:.0f} s"


def _uncounted():
    """Without the mode that counts operations: compiled code has none, and can't run under it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def vllm_cpu_op(data: Data) -> tuple[Call, str]:
    """vLLM's compiled operation, on a cache that its own operation has filled."""
    key, value = (tokens[0].transpose(0, 1) for tokens in data.gather())
    try:
        return vllm_cpu.decode_call(
            data.query, key, value, data.block_ids, len(data.hnd[0]), data.block_size, data.scale
        )
    except vllm_cpu.Missing as missing:
        raise Unavailable(str(missing)) from None


class Peer(NamedTuple):
    """make:     Data -> (the call that is timed, a note)
    copies:   of the whole cache that it keeps, beside the HND one that all share
    making:   of K and V that making it takes for a while
    compiled: what it does is inside compiled code: there are no operations to count
    """

    make: Callable[[Data], tuple[Call, str]]
    copies: int
    making: int
    compiled: bool = False


PEERS = {
    "paged_attention_HND": Peer(paged_attention_hnd, copies=0, making=1),
    "paged_attention_NHD": Peer(paged_attention_nhd, copies=1, making=0),
    "gather_sdpa": Peer(gather_sdpa, copies=0, making=0),
    "dense_sdpa": Peer(dense_sdpa, copies=1, making=1),
    "flex_paged": Peer(flex_paged, copies=1, making=3, compiled=True),
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
        raise Unavailable(_reason(error)) from error


def _reason(error: Exception, longest: int = 100) -> str:
    """The error's kind and first line; of a path its last part, as the JSON goes to others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    text = re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)*([^\s/'\"]*)", r"\1", text)
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."
