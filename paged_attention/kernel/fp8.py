"""fp8 caches: one byte an element, moved as bytes and widened while a wave is in the cache.

There are two formats, e4m3 (up to 448, torch's float8_e4m3fn) and e5m2 (up to 57,344, which is the
upper half of a float16). Bytes stay uint8 until they become float32, because PyTorch before 2.2
neither gathers nor compares its float8 types.
"""

import torch
from torch import Tensor

FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FLOAT8S = tuple(dict.fromkeys(FORMATS.values()))
KV_CACHE_DTYPES = ("auto", *FORMATS)

# Tensors, because PyTorch 2.1 doesn't take numbers here under a dispatch mode.
MAGNITUDE = torch.tensor(0x7F, dtype=torch.uint8, device="cpu")
NO_BIT_14 = torch.tensor(~0x4000, dtype=torch.int16, device="cpu")


def element_dtype(cache_dtype: torch.dtype, kv_cache_dtype: str) -> torch.dtype:
    """What a cache's elements are read as: uint8 holds the format that kv_cache_dtype names."""
    return FORMATS[kv_cache_dtype] if cache_dtype == torch.uint8 else cache_dtype


def widen(raw: Tensor, dtype: torch.dtype, fp16_bits: Tensor, out: Tensor) -> Tensor:
    """out = raw, by value.

    On a CPU a float16 is made of the bits, because PyTorch's conversion of e4m3 takes several
    times as long there. The exponents of both formats fit into a float16's.

    Args:    raw: uint8, contiguous, overwritten;  dtype: the float8 that its bytes are
             fp16_bits: int16, like raw, overwritten
             out: float32, of raw's shape, whose rows are contiguous
    """
    if not raw.is_cpu:
        return out.copy_(raw.view(dtype))
    if dtype == torch.float8_e5m2:
        fp16_bits.copy_(raw).bitwise_left_shift_(8)
        return out.copy_(fp16_bits.view(torch.float16))
    # seeeemmm becomes s0eeeemmm0000000, and a NaN becomes s11111mmm0000000. Exponents are biased
    # by 7 in the one format and by 15 in the other.
    fp16_bits.copy_(raw.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(NO_BIT_14)
    # Widened where the result will be, because adding bytes to int16 would allocate a copy.
    is_nan = out.view(torch.int16)[..., : raw.shape[-1]]
    is_nan.copy_(raw.bitwise_and_(MAGNITUDE).eq_(0x7F))
    fp16_bits.add_(is_nan, alpha=0x4000)
    return out.copy_(fp16_bits.view(torch.float16)).mul_(2.0 ** (15 - 7))
