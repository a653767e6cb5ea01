"""`make test-cuda-source`: NVRTC of one version compiles paged_decode.cu for every architecture.

Nothing runs. What is held: it compiles as C++11 and C++14, which CUDA 10.2 has, without a warning.
Every kernel that the loaders name is there. Two blocks of threads fit the 65,536 registers of a
multiprocessor. A thread spills 32 bytes at most, because the compiler sometimes spills a few, so
that more threads fit. A table says what each kernel takes.
"""

from __future__ import annotations

import re

import pytest

from paged_attention.kernel.compiled import nvrtc
from paged_attention.kernel.compiled.driver import THREADS
from paged_attention.kernel.compiled.library import SOURCE

ARCHITECTURES = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"]
KERNELS = [f"paged_decode_phase1_{t}_{n}" for t in ("float16", "bfloat16") for n in range(1, 9)]
KERNELS.append("paged_decode_phase2")


def compiled(arch, *options):
    includes = [f"-I{folder}" for folder in nvrtc.include_folders()]
    return nvrtc.compile_source(SOURCE, [f"--gpu-architecture={arch}", *options, *includes])


@pytest.mark.parametrize("words", [1, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_and_fits_the_registers(arch, words, capsys):
    made = compiled(arch, "-std=c++14", f"-DLOAD_WORDS={words}", "--ptxas-options=-v")
    assert made.image.startswith(b"\x7fELF")
    assert all(f"{name}\0".encode() in made.image for name in [*KERNELS, "paged_decode_about"])
    of_kernel = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) .*?Used (\d+) registers"
    found = {
        name: (int(stores) + int(loads), int(registers))
        for name, stores, loads, registers in re.findall(of_kernel, made.log, re.DOTALL)
    }
    assert found.keys() == {*KERNELS}
    with capsys.disabled():
        spilled = {name: count for name, (count, _) in found.items() if count}
        taken = ", ".join(f"{name.split('_', 2)[2]} {count}" for name, (_, count) in found.items())
        print(f"\n{nvrtc.library().rpartition('/')[2]} {arch} LOAD_WORDS={words}: {taken}")
        print(f"bytes spilled: {spilled or 'none'}")
    assert max(bytes_spilled for bytes_spilled, _ in found.values()) <= 2 * 32  # stores and loads
    assert max(registers for _, registers in found.values()) * THREADS * 2 <= 65_536


@pytest.mark.parametrize("standard", ["c++11", "c++14", "c++17"])
def test_it_compiles_to_ptx_in_every_standard_without_a_warning(standard):
    made = compiled("compute_75", f"-std={standard}")
    assert b".target sm_75" in made.image and made.log.strip() == ""


def test_an_error_in_the_source_is_said(tmp_path):
    wrong = tmp_path / "wrong.cu"
    wrong.write_text("int x = y;")
    with pytest.raises(RuntimeError, match='identifier "y" is undefined'):
        nvrtc.compile_source(wrong, ["--gpu-architecture=sm_75"])
