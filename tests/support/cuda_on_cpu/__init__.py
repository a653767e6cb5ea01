"""paged_decode.cu compiled as C++ by the host's compiler, so that a CPU runs it: see turns.cpp."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from paged_attention.kernel.compiled.cuda_source import SOURCE, CudaLibrary

HERE = Path(__file__).parent
COMPILER = next((c for c in (os.environ.get("CXX"), "g++", "c++") if c and shutil.which(c)), None)
WARPS, FORWARD, BACKWARD = (32, 64), 0, 1


class CpuLibrary(CudaLibrary):
    """A library whose blocks run thread by thread. Threads that do what CUDA leaves undefined are a
    RuntimeError."""

    def __init__(self, path, warp_size=32, order=FORWARD):
        super().__init__(path)
        self.warp_size, self.order = warp_size, order
        self.library = ctypes.CDLL(path)

    def run(self, step, stream):
        self.library.on_cpu_set(self.warp_size, self.order)
        super().run(step, stream)


def compiled(folder, load_words=1, change=("", "")):
    """The path of paged_decode.cu, with one change of its text if there is one, compiled."""
    text = SOURCE.read_text(encoding="utf-8")
    assert change[0] != change[1] or change == ("", "")
    assert change == ("", "") or text.count(change[0]) == 1, change
    source, library = folder / "paged_decode.cu", folder / f"paged_decode_{load_words}.so"
    source.write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
    flags = ["-std=c++14", "-O1", "-Wall", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"]
    flags += ["-shared", "-fPIC", f"-DLOAD_WORDS={load_words}", f"-I{HERE}"]
    command = [COMPILER, *flags, "-include", "device.h", "-x", "c++", source, HERE / "turns.cpp"]
    done = subprocess.run([*command, "-o", library], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return str(library)
