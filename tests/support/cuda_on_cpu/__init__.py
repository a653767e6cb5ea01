"""paged_decode.cu compiled as C++ by the host's compiler, so that a CPU runs it: see turns.cpp."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from pools import paged, random

from paged_attention.kernel.compiled.library import SOURCE, CudaLibrary

HERE = Path(__file__).parent
COMPILER = next((c for c in (os.environ.get("CXX"), "g++", "c++") if c and shutil.which(c)), None)
FLAGS = "-std=c++14 -U_FORTIFY_SOURCE -shared -fPIC".split()
WARP_SIZES, FORWARD, BACKWARD, SHUFFLED = (32, 64), 0, 1, 7


class CpuLibrary(CudaLibrary):
    """A library whose threads take turns. What CUDA leaves undefined is a RuntimeError."""

    def __init__(self, path, warp_size=32, order=FORWARD):
        super().__init__(path)
        self.warp_size, self.order, self.library = warp_size, order, ctypes.CDLL(path)

    def run(self, step, stream):
        self.library.on_cpu_set(self.warp_size, self.order)
        super().run(step, stream)


def compiled(folder, load_words=1, changes=(), optimized="-O1"):
    """The path of the library that is made of paged_decode.cu.

    Args:    changes: pairs of a text that stands in paged_decode.cu once, and what takes its place
             optimized: -O0 is compiled sooner, and runs longer
    """
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1 and old != new, old
        text = text.replace(old, new)
    (folder / "paged_decode.cu").write_text(text, encoding="utf-8")
    library = folder / f"paged_decode_{load_words}.so"
    command = [COMPILER, optimized, *FLAGS, f"-DLOAD_WORDS={load_words}", f"-I{folder}"]
    command += [f"-I{HERE}", HERE / "library.cpp", "-o", library, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(library)


def ways(libraries, block_size):
    """Warps of both sizes, orders of turns and widths of loads, as the block size allows them.

    Args:    libraries: a function from load_words to a path
    """
    for words, warp_size, order in ((1, 32, FORWARD), (1, 64, BACKWARD), (4, 64, SHUFFLED)):
        if block_size % (2 * words) == 0:
            yield CpuLibrary(libraries(words), warp_size, order)


def a_step(dtype=torch.float16, block_size=16, spare=3, **options):
    """(the inputs of a small step, its options)"""
    dense = random([40, 17, 33], 6, 2, 64, sharp=3.0, dtype=dtype)
    pool = paged(dense, block_size, "vllm", spare=spare)
    how = {"max_seq_len": 48, "partition_size": 16, "return_lse": True} | options
    return (dense.query, *pool), how


needs_a_compiler = pytest.mark.skipif(
    COMPILER is None, reason="NO C++ COMPILER: paged_decode.cu was not run at all (apt: g++)"
)
