"""Every error the contract promises about tensors and sizes.

A message names the argument, its value, and what it should be. `check_tensors` looks at types,
ranks, shapes, dtypes, devices and aliasing and never reads a value; `check_lengths` and
`check_block_ids` read lengths and ids, which on an accelerator costs a synchronisation.
"""

from numbers import Integral

import torch

from paged_attention.kernel.aliasing import overlap, overlaps_itself
from paged_attention.kernel.fp8 import FLOAT8S, KV_CACHE_DTYPES
from paged_attention.kernel.layouts import LAYOUTS, Geometry, cache_shapes
from paged_attention.kernel.partition import ceil_div

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)


def check_tensors(query, key_cache, value_cache, block_tables, seq_lens, layout, kv_cache_dtype):
    """Check everything about the inputs that is not a value.

    Returns: (layout, Geometry), the layout resolved
    Raises:  TypeError, ValueError: which argument, its value, what it should be
    """
    tensors = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
    }
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}")
    if query.dtype not in FLOATS:
        raise TypeError(f"query must be float32, float16 or bfloat16, got {query.dtype}")
    check_cache_dtypes(key_cache, value_cache, kv_cache_dtype)
    for name in ("block_tables", "seq_lens"):
        if tensors[name].dtype not in INTS:
            raise TypeError(f"{name} must be int32 or int64, got {tensors[name].dtype}")
    for name, tensor in tensors.items():
        if tensor.device != query.device and not (name == "seq_lens" and tensor.is_cpu):
            raise ValueError(f"{name} must be on {query.device} like query, got {tensor.device}")

    layout = resolve_layout(key_cache, layout)
    geometry = cache_geometry(key_cache, value_cache, layout)
    check_query(query, geometry)
    if block_tables.dim() != 2 or len(block_tables) != len(query):
        raise ValueError(
            f"block_tables must be (num_seqs, max_blocks) with num_seqs = {len(query)} like "
            f"query, got {tuple(block_tables.shape)}"
        )
    if seq_lens.shape != (len(query),):
        raise ValueError(
            f"seq_lens must be (num_seqs,) = ({len(query)},) like query, "
            f"got {tuple(seq_lens.shape)}"
        )
    return layout, geometry


def check_cache_dtypes(key_cache, value_cache, kv_cache_dtype):
    """Float caches and torch's float8 describe themselves; uint8 needs a name for its format."""
    if not isinstance(kv_cache_dtype, str) or kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {kv_cache_dtype!r}"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if kv_cache_dtype != "auto":
            if cache.dtype != torch.uint8:
                raise ValueError(
                    f"{name} must be torch.uint8 with kv_cache_dtype={kv_cache_dtype!r}, "
                    f"got {cache.dtype}"
                )
        elif cache.dtype == torch.uint8:
            raise ValueError(
                f"{name} is torch.uint8, which says nothing of its format: "
                f'kv_cache_dtype must name it, got "auto"'
            )
        elif cache.dtype not in FLOATS + FLOAT8S:
            raise TypeError(f"{name} must be float32, float16 or bfloat16, got {cache.dtype}")
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(
            f"value_cache must have the dtype of key_cache, {key_cache.dtype}, "
            f"got {value_cache.dtype}"
        )


def check_flag(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_backend(backend):
    if backend is not None and (not isinstance(backend, str) or backend != "eager"):
        raise ValueError(f'backend must be None or "eager", got {backend!r}')


def resolve_layout(key_cache, layout):
    """The layout meant; None is "vllm" for a 5-D key cache."""
    rank = key_cache.dim()
    if layout is None:
        if rank == 5:
            return "vllm"
        if rank == 4:
            raise ValueError(
                'layout must be "HND" or "NHD" for a 4-D key_cache (the two can\'t be told '
                "apart), got None"
            )
        raise ValueError(f"key_cache must be 4-D or 5-D, got shape {tuple(key_cache.shape)}")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if rank != (5 if layout == "vllm" else 4):
        raise ValueError(
            f"key_cache must be {5 if layout == 'vllm' else 4}-D in layout {layout!r}, "
            f"got shape {tuple(key_cache.shape)}"
        )
    return layout


def cache_geometry(key_cache, value_cache, layout):
    """The cache's Geometry; both tensors must have exactly the shapes it gives them."""
    if value_cache.dim() != 4:
        raise ValueError(f"value_cache must be 4-D, got shape {tuple(value_cache.shape)}")
    order = {"vllm": (0, 3, 1, 2), "HND": (0, 2, 1, 3), "NHD": (0, 1, 2, 3)}[layout]
    geometry = Geometry(*(value_cache.shape[dim] for dim in order))
    for name in ("block_size", "num_kv_heads", "head_size"):
        if getattr(geometry, name) < 1:
            raise ValueError(
                f"value_cache must have a {name} of at least 1, got shape "
                f"{tuple(value_cache.shape)} in layout {layout!r}"
            )
    key_shape, _ = cache_shapes(geometry, layout, key_cache.dtype)
    if key_cache.shape != key_shape:
        raise ValueError(
            f"key_cache must be {key_shape} in layout {layout!r} for value_cache "
            f"{tuple(value_cache.shape)} and {key_cache.dtype}, got {tuple(key_cache.shape)}"
        )
    return geometry


def check_query(query, geometry):
    if query.dim() not in (3, 4):
        raise ValueError(
            "query must be (num_seqs, num_heads, head_size) or (num_seqs, q_len, num_heads, "
            f"head_size), got {tuple(query.shape)}"
        )
    if query.dim() == 4 and not query.shape[1]:
        raise ValueError(f"query must have a q_len of at least 1, got {tuple(query.shape)}")
    num_heads, head_size = query.shape[-2:]
    if head_size != geometry.head_size:
        raise ValueError(
            f"query has head_size {head_size}, but key_cache has head_size {geometry.head_size}"
        )
    if num_heads < 1 or num_heads % geometry.num_kv_heads:
        raise ValueError(
            f"query has num_heads {num_heads}, which must be a multiple of the cache's "
            f"num_kv_heads {geometry.num_kv_heads}"
        )


def checked_count(name, value, least=1):
    """A whole number of at least `least`, as an int (numpy's wrap around); None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if not least <= value < 2**63:
        raise ValueError(f"{name} must be at least {least}, and below 2**63, got {value!r}")
    return int(value)


def checked_device(device):
    """A torch.device, with its index, that this PyTorch can put a tensor on."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one that this PyTorch has, got {device!r}") from error


def required_count(name, value, least=1):
    """As checked_count, for what has no default."""
    if value is None:
        raise TypeError(f"{name} must be a whole number, got None")
    return checked_count(name, value, least)


def check_out(out, query, inputs):
    """`out` has query's shape, its dtype or float32, its device, and shares memory with nothing.

    Args:    inputs: name -> tensor, all that is read
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a tensor, got {type(out).__name__}")
    if out.layout != torch.strided:
        raise TypeError(f"out must be a dense tensor, got {out.layout}")
    if out.dtype not in (query.dtype, torch.float32):
        raise TypeError(f"out must be {query.dtype} like query, or float32, got {out.dtype}")
    if out.shape != query.shape:
        raise ValueError(f"out must be {tuple(query.shape)} like query, got {tuple(out.shape)}")
    if out.device != query.device:
        raise ValueError(f"out must be on {query.device} like query, got {out.device}")
    if overlaps_itself(out):
        raise ValueError(
            f"out must not overlap itself, got strides {out.stride()} for {tuple(out.shape)}"
        )
    if out.requires_grad:
        raise ValueError("out must not require grad: it is written to in place")
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor) and overlap(out, tensor):
            raise ValueError(
                f"out must not overlap {name}: their memory, from addresses {out.data_ptr():#x} "
                f"and {tensor.data_ptr():#x} on, intersects"
            )


def check_lengths(lengths, block_tables, geometry, max_seq_len):
    """Check seq_lens against the tables and max_seq_len.

    Args:    lengths: list of int, seq_lens on the host
    """
    covered = block_tables.shape[1] * geometry.block_size
    for seq, seq_len in enumerate(lengths):
        if seq_len < 0:
            raise ValueError(f"seq_lens[{seq}] must be at least 0, got {seq_len}")
        if max_seq_len is not None and seq_len > max_seq_len:
            raise ValueError(
                f"max_seq_len must be at least the longest sequence, got {max_seq_len} for "
                f"seq_lens[{seq}] = {seq_len}"
            )
        if seq_len > covered:
            raise ValueError(
                f"seq_lens[{seq}] = {seq_len} is more than its row of block_tables covers: "
                f"{block_tables.shape[1]} columns x block size {geometry.block_size} = {covered}"
            )


def check_block_ids(lengths, firsts, block_tables, geometry):
    """Check every live block id; on an accelerator this reads block_tables back to the host.

    Args:    lengths, firsts: lists of int: of each sequence the end, and the first token needed
    """
    if not lengths or not block_tables.shape[1]:
        return
    table = block_tables.cpu()
    outside = (table < 0) | (table >= geometry.num_blocks)  # (num_seqs, max_blocks)
    if not outside.any():
        return
    columns = torch.arange(table.shape[1], device="cpu")
    ends = [ceil_div(seq_len, geometry.block_size) for seq_len in lengths]
    live = columns < torch.tensor(ends, device="cpu").unsqueeze(1)
    if any(firsts):
        firsts = [first // geometry.block_size for first in firsts]
        live &= columns >= torch.tensor(firsts, device="cpu").unsqueeze(1)
    bad = (live & outside).nonzero()
    if len(bad):
        seq, column = bad[0].tolist()
        raise ValueError(
            f"block_tables[{seq}][{column}] is block {int(table[seq, column])}, outside the pool "
            f"of {geometry.num_blocks} blocks (sequence {seq}, column {column}): reading it "
            f"would read memory that is not the sequence's own"
        )
