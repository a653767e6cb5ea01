"""A cubin or PTX that NVRTC made, loaded and launched through CUDA's driver API by ctypes.

No CUDA device has run this file yet. A test runs it against a stand-in for libcuda.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

from .library import DTYPES, Step, checked_load_words, named_file

THREADS = 256
NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in DTYPES.items()}


class CudaModule:
    """paged_decode.cu as NVRTC compiled it, on the current CUDA device.

    Args:    path: None means what the environment variable PAGED_ATTENTION_CUDA_LIBRARY names
             driver: the driver's library
    Raises:  ValueError: nothing is named, or it is of another version of paged_decode.cu
             RuntimeError: CUDA's error
    """

    device_type = "cuda"

    def __init__(
        self, path: str | os.PathLike | None = None, driver: str = "libcuda.so.1"
    ) -> None:
        path = named_file(path)
        self._driver, self._module = ctypes.CDLL(driver), ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # makes PyTorch's context the current one
        image = Path(path).read_bytes() + b"\0"  # because PTX is a string
        self._call("cuModuleLoadData", ctypes.byref(self._module), image)
        place, size, about = ctypes.c_void_p(), ctypes.c_size_t(), (ctypes.c_int * 3)()
        symbol = self._module, b"paged_decode_about"
        self._call("cuModuleGetGlobal_v2", ctypes.byref(place), ctypes.byref(size), *symbol)
        self._call("cuMemcpyDtoH_v2", about, place, size)
        self.load_words = checked_load_words(path, list(about))

    def run(self, step: Step, stream: int) -> None:
        """Launch both phases, as paged_decode_run in paged_decode.cu does."""
        chunks = -(-(step.num_heads // step.num_kv_heads) // step.heads_at_once)
        grid1 = step.num_kv_heads * chunks, step.num_seqs, step.num_partitions
        phase1 = f"paged_decode_phase1_{NAMES[step.dtype]}_{step.heads_at_once}"
        self._launch(phase1, grid1, step.shared_bytes, stream, step)
        grid2 = step.num_heads, step.num_seqs, 1
        self._launch("paged_decode_phase2", grid2, 0, stream, step)

    def _launch(
        self, name: str, grid: tuple[int, int, int], shared_bytes: int, stream: int, step: Step
    ) -> None:
        if name not in self._functions:
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[name] = function
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(step))
        sizes = (ctypes.c_uint(n) for n in (*grid, THREADS, 1, 1, shared_bytes))
        where = self._functions[name], *sizes, ctypes.c_void_p(stream)
        self._call("cuLaunchKernel", *where, arguments, None)

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} failed with CUDA's error {error}")
