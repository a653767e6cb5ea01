"""paged_decode.cu as a shared library: found, compared with what is here, and launched."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Protocol

import torch

from ..checks import refuse

SOURCE = Path(__file__).with_name("paged_decode.cu")
LIBRARY = "PAGED_ATTENTION_CUDA_LIBRARY"  # the variable that names what build.py made
ABI = 1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LENGTHS = "num_seqs num_heads num_kv_heads head_size block_size num_blocks max_blocks"


class Step(ctypes.Structure):
    """One step, as paged_decode.cu has it under the same name. It says what each field holds."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in "out lse exp_sums max_logits tmp_out query key_cache value_cache "
            "block_tables seq_lens alibi_slopes".split()
        ),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("query", "key", "value")),
        ("scale", ctypes.c_float),
        *(
            (name, ctypes.c_int)
            for name in f"{LENGTHS} partition_size num_partitions heads_at_once shared_bytes "
            "dtype out_dtype".split()
        ),
    ]


class Library(Protocol):
    """paged_decode.cu, compiled: a `CudaLibrary`, or a `driver.CudaModule`."""

    device_type: str
    load_words: int  # 32-bit words that a thread loads at once

    def run(self, step: Step, stream: int) -> None: ...


class CudaLibrary:
    """What nvcc or CoreX's clang++ makes of paged_decode.cu: a shared library.

    Args:    path: None means what the environment variable PAGED_ATTENTION_CUDA_LIBRARY names
    Raises:  ValueError: nothing is named, or it is no library of this version of paged_decode.cu
    """

    def __init__(self, path: str | os.PathLike | None = None) -> None:
        path = named_file(path)
        try:
            library = ctypes.CDLL(path)
            describe = library.paged_decode_describe
        except (OSError, AttributeError) as error:
            refuse("path", "a library made of paged_decode.cu", f"{path}: {error}")
        about = (ctypes.c_int * 3)()
        describe(about)
        self.load_words = checked_load_words(path, list(about))
        self._run, self._error = library.paged_decode_run, library.paged_decode_error
        self._run.argtypes = [ctypes.POINTER(Step), ctypes.c_void_p]
        library.paged_decode_device_type.restype = self._error.restype = ctypes.c_char_p
        self.device_type: str = library.paged_decode_device_type().decode()

    def run(self, step: Step, stream: int) -> None:
        """Launch both phases on the current device.

        Raises:  RuntimeError: CUDA's error
        """
        if error := self._run(step, stream):
            raise RuntimeError(f"paged_decode.cu: {self._error(error).decode()} (error {error})")


def named_file(path: str | os.PathLike | None) -> str:
    path = os.environ.get(LIBRARY) if path is None else path
    if not path:
        refuse("path", f"a file that build.py made, or {LIBRARY} must name one", repr(path))
    return os.path.abspath(path)


def checked_load_words(path: str, about: list[int]) -> int:
    """The load_words of a library or a module, if it has our ABI."""
    if about[:2] != [ABI, ctypes.sizeof(Step)]:
        rule = f"of ABI {ABI} with a Step of {ctypes.sizeof(Step)} bytes: build it again"
        refuse(path, rule, f"ABI {about[0]} and {about[1]} bytes")
    return about[2]
