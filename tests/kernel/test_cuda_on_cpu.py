"""The CPU that runs paged_decode.cu notices what is wrong with a kernel.

A result that is right, whatever the order of threads is, says little unless a lacking barrier
would make it wrong. So a copy of the kernel is broken in the ways that CUDA kernels usually are.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from cuda_on_cpu import (
    BACKWARD,
    FORWARD,
    SHUFFLED,
    WARP_SIZES,
    CpuLibrary,
    a_step,
    compiled,
    needs_a_compiler,
)
from helpers import assert_close, assert_same
from pools import INF

from paged_attention import reference_attention
from paged_attention.kernel.compiled.cuda_source import paged_decode

pytestmark = needs_a_compiler
SYNC = "    __syncthreads();\n\n    // "
SUM = "        sum = sum_over(warpSize, sum);\n"
FAULTS = {  # what is broken: (changes, what of the answers tells)
    "no barrier before K is multiplied": ([(SYNC + "K times", "// K times")], "wrong"),
    "no barrier before the softmax": ([(SYNC + "The softmax", "// The softmax")], "wrong"),
    "no barrier before V is multiplied": ([(SYNC + "The weights", "// The weights")], "wrong"),
    "a barrier that some threads pass by": (
        [(SYNC + "The softmax", "    if (threadIdx.x < 200) __syncthreads(); // The softmax")],
        "isn't at the barrier",
    ),
    "a shuffle that some lanes pass by": (
        [(SUM, "        if (lane < 16)" + SUM)],
        "isn't at the shuffle",
    ),
    "a softmax over 32 lanes where a warp has 64": (
        [("h = threadIdx.x / warpSize", "h = threadIdx.x / 32")],
        "isn't at the shuffle",
    ),
    "a sum over 32 lanes where a warp has 64": (
        [(SUM, "        sum = sum_over(32, sum);\n")],
        "wrong",
    ),
    "a lane's number in 32 where a warp has 64": (
        [("const int lane = threadIdx.x % warpSize;", "const int lane = threadIdx.x % 32;")],
        "wrong",
    ),
    "a mask of half the lanes": (
        [("#define EVERY_LANE 0xffffffff", "#define EVERY_LANE 0xffff")],
        "leaves lanes out",
    ),
    "more shared memory used than asked for": (
        [("int *blocks = (int *)(", "int *blocks = 1 + (int *)(")],
        "wrote past the shared memory",
    ),
    "what lies past a sequence's end in V": ([("if (column + i >= end) break;", "")], "wrong"),
}


FEWER = [  # because kernels of up to 3 heads are compiled sooner
    ("X(dtype, is_bf16, 4) \\\n    X(dtype, is_bf16, 5) X(dtype, is_bf16, 6)", ""),
    (" X(dtype, is_bf16, 7) X(dtype, is_bf16, 8)", ""),
]


def what_tells(path):
    """What is wrong with a library's answers: a fault that the stand-in saw, or "wrong"."""
    for partition_size in (16, 48):
        call, how = a_step(partition_size=partition_size)
        right, right_lse = reference_attention(*call)
        for warp_size in WARP_SIZES:
            for order in (FORWARD, BACKWARD, SHUFFLED):
                library = CpuLibrary(path, warp_size, order)
                try:
                    out, lse = paged_decode(library, *call, **how)
                    assert_close(out, right)
                    assert_close(lse, right_lse, extra=1e-5)
                except RuntimeError as fault:
                    return str(fault)
                except AssertionError:
                    return "wrong"
    return "nothing"


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_kernel_is_noticed(tmp_path, name):
    changes, tells = FAULTS[name]
    assert tells in what_tells(compiled(tmp_path, changes=changes + FEWER, optimized="-O0"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("cu"), optimized="-O0")


def test_a_kernel_that_is_not_broken_is_not_suspected(library):
    assert what_tells(library) == "nothing"


def test_the_stand_ins_fp16_is_pytorchs(library):
    loaded = ctypes.CDLL(library)
    to_float, to_half = loaded.on_cpu_half_to_float, loaded.on_cpu_float_to_half
    to_float.restype, to_half.argtypes = ctypes.c_float, [ctypes.c_float]
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    right = bits.view(torch.float16).float()
    got = torch.tensor([to_float(int(b) & 0xFFFF) for b in bits])
    assert_same(got, right)
    finite = right[right.isfinite()].double()
    numbers = torch.cat([finite, finite * 1.00048828125, finite * 0.9997, finite + 2**-25])
    numbers = torch.cat([numbers.float(), torch.tensor([65519.0, 65520.0, 1e9, -INF])])
    halves = torch.tensor([to_half(float(x)) for x in numbers], dtype=torch.int32)
    assert torch.equal(halves.to(torch.int16), numbers.half().view(torch.int16))
