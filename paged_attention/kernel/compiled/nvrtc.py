"""NVRTC, NVIDIA's compiler as a library: paged_decode.cu without nvcc and without a C++ compiler.

It is in PyPI as nvidia-cuda-nvrtc-cu11 or -cu12, and needs the headers of nvidia-cuda-runtime-cu11
or -cu12.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Compiled(NamedTuple):
    image: bytes
    log: str


def found(pattern: str) -> list[Path]:
    """Files of NVIDIA's wheels in this Python, the newest version last."""
    return sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/{pattern}"))


def library() -> str | None:
    """The path of NVRTC's library, if there is one."""
    files = [path for path in found("lib/libnvrtc.so.*") if "alt" not in path.name]
    return str(files[-1]) if files else ctypes.util.find_library("nvrtc")


def include_folders() -> list[Path]:
    """Where cuda_fp16.h is."""
    folders = [path.parent for path in found("include/cuda_fp16.h")]
    return folders or [
        p for p in [Path("/usr/local/cuda/include")] if (p / "cuda_fp16.h").exists()
    ]


def compile_source(source: Path, options: Sequence[str], path: str | None = None) -> Compiled:
    """A cubin for --gpu-architecture=sm_..., or PTX for compute_....

    Args:    path: of NVRTC's library. None: where `library` finds it
    Raises:  RuntimeError: what the compiler says
    """
    nvrtc, program = ctypes.CDLL(path or library()), ctypes.c_void_p()

    def text_of(kind: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, text)
        return text.raw

    name, text = source.name.encode(), source.read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    error = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = text_of("ProgramLog").rstrip(b"\0").decode()
    if error:
        raise RuntimeError(f"NVRTC's error {error}: {log}")
    is_cubin = any(option.startswith("--gpu-architecture=sm_") for option in options)
    return Compiled(text_of("CUBIN" if is_cubin else "PTX"), log)
