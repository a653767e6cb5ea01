"""fp8 caches: a byte an element, moved as bytes and widened while a wave is in the cache.

Two formats: e4m3 (finite up to 448, torch's float8_e4m3fn) and e5m2 (up to 57344, the upper half
of a float16). PyTorch before 2.2 neither gathers nor compares its float8 types, so that bytes stay
uint8 until they become float32.
"""

import torch

FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FLOAT8S = tuple(dict.fromkeys(FORMATS.values()))
KV_CACHE_DTYPES = ("auto", *FORMATS)

# As tensors, since PyTorch 2.1 doesn't take numbers here under a dispatch mode.
MAGNITUDE = torch.tensor(0x7F, dtype=torch.uint8, device="cpu")
NO_BIT_14 = torch.tensor(~0x4000, dtype=torch.int16, device="cpu")


def meaning_of(dtype, kv_cache_dtype):
    """The dtype that a cache's elements are to be read as."""
    return FORMATS[kv_cache_dtype] if dtype == torch.uint8 else dtype


def widen(raw, meaning, half, out):
    """out = raw, by value.

    Args:    raw: uint8, contiguous, overwritten;  meaning: the float8 dtype that its bytes are of
             half: int16, like raw;  out: float32, of its shape
    Cost:    on a CPU, whose e4m3 conversion in PyTorch takes several times as long, a float16 is
             made of the bits: the exponents of both formats fit in its own
    """
    if raw.device.type != "cpu":
        return out.copy_(raw.view(meaning))
    if meaning == torch.float8_e5m2:
        half.copy_(raw).bitwise_left_shift_(8)
        return out.copy_(half.view(torch.float16))
    # seeeemmm -> s0eeeemmm0000000, or s11111mmm0000000 for NaN; exponents are biased by 7 in the
    # one format and by 15 in the other.
    half.copy_(raw.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(NO_BIT_14)
    half.add_(raw.bitwise_and_(MAGNITUDE).eq_(0x7F), alpha=0x4000)
    return out.copy_(half.view(torch.float16)).mul_(2.0 ** (15 - 7))
