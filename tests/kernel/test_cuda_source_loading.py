"""How paged_decode.cu is found, compared, called and refused, and how it is built."""

from __future__ import annotations

import functools

import cuda_source_device
import pytest
import torch
from cuda_on_cpu import CpuLibrary, a_step, compiled, needs_a_compiler
from helpers import assert_same
from pools import inside

from paged_attention.kernel.compiled import build
from paged_attention.kernel.compiled.cuda_source import paged_decode
from paged_attention.kernel.compiled.driver import CudaModule
from paged_attention.kernel.compiled.library import ABI, SOURCE, CudaLibrary
from paged_attention.kernel.compiled.nvrtc import Compiled

pytestmark = needs_a_compiler


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A library for each load_words, by its path."""
    return functools.cache(
        lambda words: compiled(tmp_path_factory.mktemp("cu"), words, optimized="-O0")
    )


# -- what is refused


REFUSED = {
    "float32": (("query", "float16"), lambda call: [t.float() for t in call[:1]] + call[1:]),
    "mixed": (("key_cache", "bfloat16"), lambda call: [call[0].bfloat16(), *call[1:]]),
    "int64 lengths": (("seq_lens", "int32"), lambda call: [*call[:4], call[4].long()]),
    "strided": (("query", "strides"), lambda call: [inside(call[0], 2), *call[1:]]),
    "strided table": (("block_tables",), lambda call: [*call[:3], inside(call[3], 1), call[4]]),
    "strided caches": (("value_cache",), lambda call: [*call[:2], inside(call[2], 3), *call[3:]]),
    "several rows": (("query", "num_seqs"), lambda call: [call[0].unsqueeze(1), *call[1:]]),
    "meta": (("on a cpu device",), lambda call: [t.to("meta") for t in call]),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_the_kernel_does_not_serve_is_refused_by_name(libraries, fault):
    words, change = REFUSED[fault]
    call, how = a_step()
    with pytest.raises((TypeError, ValueError)) as caught:
        paged_decode(CpuLibrary(libraries(1)), *change(list(call)), **how)
    assert all(word in str(caught.value) for word in words), caught.value


def test_block_sizes_and_addresses_that_a_load_would_cross_are_refused(libraries):
    wide = CpuLibrary(libraries(4))
    call, how = a_step(block_size=4)
    with pytest.raises(ValueError, match="block_size must be a multiple of 8"):
        paged_decode(wide, *call, **how)
    (query, key, value, *rest), how = a_step()
    shifted = torch.zeros(key.numel() + 1, dtype=key.dtype)[1:].view(key.shape)
    with pytest.raises(ValueError, match="key_cache must be of blocks that begin at"):
        paged_decode(wide, query, shifted, value, *rest, **how)


def test_a_library_of_another_kind_is_refused(libraries, tmp_path, monkeypatch):
    monkeypatch.delenv("PAGED_ATTENTION_CUDA_LIBRARY", raising=False)
    with pytest.raises(ValueError, match="PAGED_ATTENTION_CUDA_LIBRARY"):
        CudaLibrary()
    (tmp_path / "text.so").write_text("no library")
    for path in (tmp_path / "text.so", tmp_path / "nowhere.so"):
        with pytest.raises(ValueError, match="a library made of paged_decode.cu"):
            CudaLibrary(path)
    monkeypatch.setenv("PAGED_ATTENTION_CUDA_LIBRARY", libraries(1))
    assert CudaLibrary().load_words == 1
    other = compiled(tmp_path, changes=[("#define ABI 1", "#define ABI 2")], optimized="-O0")
    with pytest.raises(ValueError, match=f"of ABI {ABI} with a Step of .* got ABI 2"):
        CudaLibrary(other)


# -- the loader of what NVRTC makes


class OnCpu(CudaModule):
    device_type = "cpu"


def test_the_drivers_loader_launches_what_the_library_launches(libraries, tmp_path):
    path = tmp_path / "image"
    path.write_text("paged_decode")
    for words in (1, 4):
        module = OnCpu(path, driver=libraries(words))
        assert module.load_words == words
        for options in ({"dtype": torch.bfloat16}, {"partition_size": 48}):
            call, how = a_step(**options)
            wanted = paged_decode(CpuLibrary(libraries(words)), *call, **how)
            for got, right in zip(paged_decode(module, *call, **how), wanted):
                assert_same(got, right)


def test_the_drivers_errors_are_raised(libraries, tmp_path):
    path = tmp_path / "image"
    path.write_text("something else")
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed with CUDA's error 200"):
        OnCpu(path, driver=libraries(1))


# -- the build script


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """A machine without a compiler, and a function that puts one there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COREX_ROOT", str(tmp_path / "corex"))
    monkeypatch.setattr(build, "glob", lambda pattern: [])
    monkeypatch.setattr(build.nvrtc, "library", lambda: None)
    monkeypatch.chdir(tmp_path)

    def put(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$@" > said\nexit "${FAILS:-0}"\n')
        path.chmod(0o755)
        return path

    return put


def test_the_build_says_its_command_and_runs_it(no_compiler, tmp_path, capsys):
    assert build.main([]) == 1
    assert "no compiler was found of corex, nvcc, nvrtc" in capsys.readouterr().err
    nvcc = no_compiler("nvcc")
    assert build.main(["--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{nvcc} -O3 -shared -arch=sm_") and not (tmp_path / "said").exists()
    assert build.main(["--load-words", "4", "--arch", "sm_80", "--out", "a.so"]) == 0
    command, export = capsys.readouterr().out.splitlines()
    ran = (tmp_path / "said").read_text().split()
    assert command.split() == [str(nvcc), *ran]
    assert {"-arch=sm_80", "-DLOAD_WORDS=4", str(SOURCE)} <= {*ran} and ran[-2:] == ["-o", "a.so"]
    assert export == f"export PAGED_ATTENTION_CUDA_LIBRARY={tmp_path / 'a.so'}"


def test_corex_comes_before_nvcc_because_its_nvcc_compiles_nothing(
    no_compiler, tmp_path, capsys, monkeypatch
):
    no_compiler("nvcc")
    clang = no_compiler("corex/bin/clang++")
    assert build.main(["--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        f"{clang} -O3 -shared --cuda-path={clang.parents[1]}"
    )
    monkeypatch.setenv("FAILS", "3")
    assert build.main([]) == 1
    assert "returned non-zero exit status 3" in capsys.readouterr().err
    assert build.main(["--compiler", "nvrtc"]) == 1


def test_nvrtc_is_given_what_the_line_says(no_compiler, tmp_path, capsys, monkeypatch):
    given = []
    monkeypatch.setattr(build.nvrtc, "library", lambda: "libnvrtc.so.12")
    monkeypatch.setattr(build.nvrtc, "include_folders", lambda: [tmp_path])
    monkeypatch.setattr(
        build.nvrtc, "compile_source", lambda *call: given.append(call) or Compiled(b"ELF", "")
    )
    assert build.main(["--arch", "sm_90"]) == 0
    options = ["--gpu-architecture=sm_90", "-std=c++14", "-DLOAD_WORDS=1", f"-I{tmp_path}"]
    assert given == [(SOURCE, options, "libnvrtc.so.12")]
    assert (tmp_path / "paged_decode.cubin").read_bytes() == b"ELF"
    line = ["libnvrtc.so.12", *options, str(SOURCE), "-o", "paged_decode.cubin"]
    assert capsys.readouterr().out.splitlines()[0].split() == line


# -- the script for those who have a device


def test_the_script_for_a_device_measures_what_is_right_and_nothing_else(
    libraries, capsys, monkeypatch
):
    monkeypatch.setattr(cuda_source_device, "HEADS", [(6, 1, 64)])
    monkeypatch.setattr(cuda_source_device, "LENGTHS", [3, 0, 17])
    arguments, right = (
        [libraries(1), "--device", "cpu", "--tokens", "40"],
        CpuLibrary(libraries(1)),
    )
    assert cuda_source_device.main(arguments, right) == 0
    *errors, time = capsys.readouterr().out.splitlines()
    assert len(errors) == 2 and time.startswith("1 x 40 tokens, 6/1/256, fp16: ")
    monkeypatch.setattr(right, "run", lambda step, stream: None)
    assert cuda_source_device.main(arguments, right) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("WRONG")
