// The conversions of CUDA's cuda_fp16.h. A test compares all of them with PyTorch's.
#pragma once

struct __half {
    unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half half) { return half.bits; }

inline float __half2float(__half half)
{
    const unsigned sign = (half.bits & 0x8000u) << 16, rest = half.bits & 0x7fffu;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | rest << 13);  // infinity, NaN
    const float two_to_112 = __uint_as_float((127 + 112) << 23);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * two_to_112));
}

inline __half __float2half_rn(float x)
{
    const unsigned short sign = __float_as_uint(x) >> 16 & 0x8000;
    const float size = std::fabs(x);
    if (size != size) return {0x7fff};
    if (size >= 65520.0f) return {(unsigned short)(sign | 0x7c00)};
    if (size < 1.0f / 16384) return {(unsigned short)(sign | (int)std::nearbyint(size * 16777216))};
    unsigned bits = __float_as_uint(size);
    bits += 0xfff + (bits >> 13 & 1);
    return {(unsigned short)(sign | ((bits >> 13) - (112 << 10)))};
}
