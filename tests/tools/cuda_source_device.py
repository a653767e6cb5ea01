"""paged_decode.cu on a device: its errors against float64, and its time at 100,000 tokens.

    python tests/tools/cuda_source_device.py paged_decode.so

A .cubin or .ptx of NVRTC's is loaded through CUDA's driver. The exit status is 1 if a result is
wrong, and then nothing is timed.
"""

from __future__ import annotations

import argparse
import sys

import torch

from paged_attention import reference_attention
from paged_attention.inputs import random_inputs
from paged_attention.kernel.compiled.cuda_source import paged_decode
from paged_attention.kernel.compiled.driver import CudaModule
from paged_attention.kernel.compiled.library import CudaLibrary
from paged_attention.measure import measure

HEADS = [(6, 1, 256), (24, 4, 256), (32, 8, 128), (9, 1, 72)]
LENGTHS = [1, 0, 700, 511, 2_049]
LARGEST_ERROR = 2e-5  # of out in float32, where the largest number is about 1


def main(arguments=None, loaded=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[65_536, 100_000])
    options = parser.parse_args(arguments)
    is_module = options.library.endswith((".cubin", ".ptx"))
    library = loaded or (CudaModule if is_module else CudaLibrary)(options.library)
    errors = [
        largest_error(library, options.device, heads, dtype)
        for heads in HEADS
        for dtype in (torch.float16, torch.bfloat16)
    ]
    if not max(errors) <= LARGEST_ERROR:  # NaN isn't, either
        print(f"WRONG: an error of more than {LARGEST_ERROR}")
        return 1
    for tokens in options.tokens:
        print_time(library, options.device, tokens)
    return 0


def print_time(library, device, tokens):
    sizes = {"num_heads": 6, "num_kv_heads": 1, "head_size": 256, "dtype": torch.float16}
    inputs = random_inputs([tokens], **sizes, device=device)
    time = measure(lambda: paged_decode(library, *inputs, max_seq_len=tokens))
    low, high = (1e3 * seconds for seconds in time.spread)
    rate = 2 * 2 * 256 * tokens / time.seconds / 1e9
    print(f"1 x {tokens:,} tokens, 6/1/256, fp16: {1e3 * time.seconds:.3f} ms", end="")
    print(f" ({low:.3f} to {high:.3f}), {rate:.0f} GB/s of K and V")


def largest_error(library, device, heads, dtype):
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_size"), heads))
    inputs = random_inputs(LENGTHS, **sizes, dtype=dtype, device=device)
    slopes = torch.linspace(-0.01, 0.01, heads[0], device=device)
    out = torch.full(inputs[0].shape, torch.nan, device=device)
    most = max(LENGTHS)
    paged_decode(library, *inputs, max_seq_len=most, alibi_slopes=slopes, out=out)
    right, _ = reference_attention(*inputs, alibi_slopes=slopes)
    error = (out.double() - right).abs().max().item()
    print(f"{'/'.join(map(str, heads))} {str(dtype).removeprefix('torch.')}: error {error:.1e}")
    return error


if __name__ == "__main__":
    sys.exit(main())
