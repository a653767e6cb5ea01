"""`paged_attention` by paged_decode.cu, the kernel in CUDA's language.

It is called through ctypes with raw pointers. So it needs no headers and no ABI of PyTorch's, and
one library serves every version of it. No call of `paged_attention` comes here by itself.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..call import Call, Inputs, check_call
from ..checks import check_flag, check_out, refuse, require_tensor, required_count
from ..options import Options
from ..partition import ceil_div, whole_blocks
from ..transforms import refuse_gradients
from ..workspace import Buffers, Workspace, default_workspace
from .library import DTYPES, LENGTHS, Library, Step

PARTITION_SIZE = 512
MOST_HEADS = 8  # that one block of threads serves
SHARED_BYTES = 48 * 1024  # that a block may have on every device


def paged_decode(
    library: Library,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    partition_size: int = PARTITION_SIZE,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_attention` by the kernel in CUDA's language, in vLLM's layout.

    Args:    library: a `CudaLibrary`, or a `driver.CudaModule`
             query: (num_seqs, num_heads, head_size), fp16/bf16. Heads and lanes contiguous
             key_cache: (num_blocks, num_kv_heads, head_size/8, block_size, 8), query's dtype, each
                   block contiguous. block_size is a multiple of twice the library's load_words
             value_cache: (num_blocks, num_kv_heads, head_size, block_size), the same
             block_tables: (num_seqs, max_blocks), seq_lens: (num_seqs,), int32, contiguous
             max_seq_len: tokens, at least the longest sequence
             alibi_slopes: None or (num_heads,), float32
             partition_size: tokens, rounded up to whole blocks
             out: query's shape, contiguous, query's dtype or float32
    Returns: as `paged_attention`. Nothing that a tensor holds is read on the host, so a sequence
             with a block id outside the pool, or beyond max_seq_len or its row of the table,
             becomes NaN
    Raises:  TypeError, ValueError: the argument, its value, and what it should be
             RuntimeError: CUDA's error at the launch
    Cost:    two launches, and no synchronisation. K and V are read once for up to 8 query heads
             of a group, and once more for each further 8
    Source:  vLLM attention_kernels.cuh, paged_attention_v2_kernel and its reduce kernel
    """
    inputs = Inputs(query, key_cache, value_cache, block_tables, seq_lens)
    options = Options(scale=scale, alibi_slopes=alibi_slopes)
    call = check_call(inputs, "vllm", "auto", options)
    check_flag("return_lse", return_lse)
    max_seq_len = required_count("max_seq_len", max_seq_len, least=0)
    block_size = call.geometry.block_size
    size = whole_blocks(required_count("partition_size", partition_size), block_size)
    if workspace is None:
        workspace = default_workspace(query.device, purpose="paged_decode.cu")
    elif not isinstance(workspace, Workspace):
        refuse("workspace", "a Workspace", type(workspace).__name__, TypeError)
    given = {**inputs._asdict(), "alibi_slopes": alibi_slopes}
    refuse_gradients(given)
    result = query.new_empty(query.shape) if out is None else out
    check_out(result, query, given | dict(zip(["workspace"], workspace.tensors())))
    _check_what_it_serves(library, call, result)
    partitions = max(1, ceil_div(max_seq_len, size))
    heads, shared_bytes = _heads_at_once(call, size)
    for name, count in (("num_seqs", len(query)), ("partitions", partitions)):
        if count > 65_535:
            refuse(f"the number of {name}", "at most 65,535 in a CUDA grid", count)
    states = len(query), query.shape[1], partitions
    scratch = workspace.bind(_scratch(states, query.shape[2]), query)
    lse = query.new_empty(states[:2], dtype=torch.float32)
    if len(query):
        step = Step(
            num_partitions=partitions,
            partition_size=size,
            heads_at_once=heads,
            shared_bytes=shared_bytes,
            out=result.data_ptr(),
            out_dtype=DTYPES[result.dtype],
            lse=lse.data_ptr(),
            **{name: getattr(scratch, name)().data_ptr() for name in _Scratch.NAMES},
            **_what_is_read(call),
        )
        if query.is_cuda:
            with torch.cuda.device(query.device):
                library.run(step, torch.cuda.current_stream().cuda_stream)
        else:
            library.run(step, 0)
    return (result, lse) if return_lse else result


class _Scratch(Buffers):
    NAMES = ("exp_sums", "max_logits", "tmp_out")

    def __init__(self, states: tuple[int, int, int], head_size: int) -> None:
        super().__init__()
        self.exp_sums = self.declare(torch.float32, *states)
        self.max_logits = self.declare(torch.float32, *states)
        self.tmp_out = self.declare(torch.float32, *states, head_size)


_scratch = functools.lru_cache(maxsize=16)(_Scratch)


def _check_what_it_serves(library: Library, call: Call, out: Tensor) -> None:
    """What `paged_attention` would take, and the kernel in CUDA's language doesn't."""
    query, key_cache, value_cache, block_tables, seq_lens = call.inputs
    lanes, block_size = 2 * library.load_words, call.geometry.block_size
    if query.device.type != library.device_type:
        refuse("query", f"on a {library.device_type} device, for this library", query.device)
    require_tensor("query", query, (torch.float16, torch.bfloat16))
    if query.dim() != 3:
        refuse("query", "(num_seqs, num_heads, head_size)", tuple(query.shape))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        require_tensor(name, cache, (query.dtype,))
        if len(cache) and not cache[0].is_contiguous():
            refuse(name, "contiguous within a block", f"strides of {cache.stride()}")
        if cache.data_ptr() % (2 * lanes) or (len(cache) > 1 and cache.stride(0) % lanes):
            refuse(name, f"of blocks that begin at multiples of {2 * lanes} bytes", cache.stride())
    if block_size % lanes:
        rule = f"a multiple of {lanes}, because {library.load_words} words are loaded at once"
        refuse("block_size", rule, block_size)
    if len(query) and not query[0].is_contiguous():
        refuse("query", "contiguous in heads and lanes", f"strides of {query.stride()}")
    tables = {"block_tables": block_tables, "seq_lens": seq_lens}
    dtypes = dict.fromkeys(tables, torch.int32) | {"alibi_slopes": torch.float32}
    tables |= {"alibi_slopes": call.options.alibi_slopes, "out": out}
    for name, tensor in tables.items():
        if tensor is not None:
            require_tensor(name, tensor, [dtypes.get(name, out.dtype)], device=query.device)
            if not tensor.is_contiguous():
                refuse(name, "contiguous", f"strides of {tensor.stride()}")


def _heads_at_once(call: Call, partition_size: int) -> tuple[int, int]:
    """(query heads of a group that one block of threads serves, its bytes of shared memory)"""
    shape, blocks = call.shape, partition_size // call.geometry.block_size
    for chunks in range(ceil_div(shape.group, MOST_HEADS), shape.group + 1):
        heads = ceil_div(shape.group, chunks)
        shared_bytes = 4 * (heads * (shape.head_size + partition_size) + blocks)
        if shared_bytes <= SHARED_BYTES:
            return heads, shared_bytes
    rule = f"such that a head fits into {SHARED_BYTES} bytes of shared memory"
    refuse("partition_size", rule, f"{partition_size} with a head_size of {shape.head_size}")


def _what_is_read(call: Call) -> dict[str, object]:
    tensors = {**call.inputs._asdict(), "alibi_slopes": call.options.alibi_slopes}
    sizes = (len(call.inputs.query), call.inputs.query.shape[1], call.geometry.num_kv_heads)
    sizes += (call.geometry.head_size, call.geometry.block_size, call.geometry.num_blocks)
    return {
        **{name: t.data_ptr() for name, t in tensors.items() if t is not None},
        **dict(zip(LENGTHS.split(), (*sizes, call.inputs.block_tables.shape[1]))),
        "query_stride": call.inputs.query.stride(0),
        "key_stride": call.inputs.key_cache.stride(0),
        "value_stride": call.inputs.value_cache.stride(0),
        "scale": call.options.scale,
        "dtype": DTYPES[call.inputs.query.dtype],
    }
