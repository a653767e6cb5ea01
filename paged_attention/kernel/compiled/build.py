"""Build paged_decode.cu: python -m paged_attention.kernel.compiled.build

It says the command and runs it. Unless --compiler names one, the compiler is the first of these
that is there:
    corex   Iluvatar's clang++, in $COREX_ROOT, /usr/local/corex or /usr/local/corex-*. It comes
            first, because CoreX also has an nvcc, which only says a version
    nvcc    NVIDIA's, on the PATH
    nvrtc   NVIDIA's as a library, from PyPI. It makes a cubin, the others a shared library
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import torch

from . import nvrtc
from .library import LIBRARY, SOURCE

COMPILERS = ("corex", "nvcc", "nvrtc")


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    chosen = [options.compiler] if options.compiler else COMPILERS
    name = next((name for name in chosen if compiler(name)), None)
    if name is None:
        print(f"no compiler was found of {', '.join(chosen)}", file=sys.stderr)
        return 1
    out = options.out or f"paged_decode.{'cubin' if name == 'nvrtc' else 'so'}"
    command = command_of(name, options.arch or architecture(name), options.load_words, out)
    print(shlex.join(command), flush=True)
    if options.dry_run:
        return 0
    try:
        if name == "nvrtc":
            compiled = nvrtc.compile_source(SOURCE, command[1:-3], command[0])
            Path(out).write_bytes(compiled.image)
        else:
            subprocess.run(command, check=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"export {LIBRARY}={os.path.abspath(out)}")
    return 0


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paged_attention.kernel.compiled.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compiler", choices=COMPILERS)
    parser.add_argument("--arch", help="sm_70, ...; default: this machine's device, or sm_70")
    parser.add_argument("--load-words", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--dry-run", action="store_true", help="say the command, and no more")
    return parser.parse_args(arguments)


def compiler(name: str) -> str | None:
    """The path of a compiler, or of NVRTC's library, if it is there."""
    if name == "nvrtc":
        return nvrtc.library()
    if name == "nvcc":
        return shutil.which("nvcc")
    roots = [os.environ.get("COREX_ROOT"), "/usr/local/corex", *sorted(glob("/usr/local/corex-*"))]
    return next((c for root in roots if root and (c := shutil.which(f"{root}/bin/clang++"))), None)


def architecture(name: str) -> str:
    if name == "corex":
        return "ivcore10"
    if not torch.cuda.is_available():
        return "sm_70"
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def command_of(name: str, arch: str, load_words: int, out: str) -> list[str]:
    """The command line. NVRTC is a library, so its line says what it is given."""
    path, define = compiler(name) or name, f"-DLOAD_WORDS={load_words}"
    if name == "nvrtc":
        includes = [f"-I{folder}" for folder in nvrtc.include_folders()]
        options = [f"--gpu-architecture={arch}", "-std=c++14", define, *includes]
        return [path, *options, str(SOURCE), "-o", out]
    if name == "nvcc":
        flags = [f"-arch={arch}", "-std=c++14", "-Xcompiler", "-fPIC"]
    else:
        root = Path(path).parents[1]
        flags = [f"--cuda-path={root}", f"--cuda-gpu-arch={arch}", "--no-cuda-version-check"]
        flags += ["-std=c++17", "-fPIC", f"-L{root}/lib64", f"-Wl,-rpath,{root}/lib64", "-lcudart"]
    return [path, "-O3", "-shared", *flags, define, str(SOURCE), "-o", out]


if __name__ == "__main__":
    sys.exit(main())
