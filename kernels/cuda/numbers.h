// 16-bit and 8-bit floats in portable C++, rounded to nearest even, as the hardware does it.
// Host and device: the emulator computes with these, and GPUs without an instruction for FP8.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define WR_BOTH __host__ __device__ __forceinline__
#else
#include <bit>
#define WR_BOTH inline
#endif

namespace wr {

WR_BOTH uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    return __builtin_bit_cast(uint32_t, value);
#endif
}

WR_BOTH float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    return __builtin_bit_cast(float, bits);
#endif
}

WR_BOTH bool is_nan(float value) { return value != value; }

WR_BOTH float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

WR_BOTH uint16_t to_bf16(float value) {
    if (is_nan(value)) return 0x7FFF;
    uint32_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

WR_BOTH float from_fp16(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return float_of(sign | 0x7F800000 | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float small = static_cast<float>(fraction) * 0x1p-24f;  // subnormal: exact
    return sign ? -small : small;
}

// `value` as a float of `fraction_bits` below the leading one and exponents from `least` on, as an
// integer in units of the last place, and those units' exponent. Ties go to even.
WR_BOTH uint32_t round_units(float magnitude, int fraction_bits, int least, int& exponent) {
    uint32_t bits = bits_of(magnitude);
    exponent = static_cast<int>(bits >> 23) - 127;
    if (exponent < least) exponent = least;
    int shift = 23 - fraction_bits + exponent - (static_cast<int>(bits >> 23) - 127);
    uint32_t whole = (bits & 0x7FFFFF) | (bits >> 23 ? 0x800000u : 0u);
    if (shift > 25) return 0;
    uint32_t kept = whole >> shift, lost = whole & ((1u << shift) - 1), half = 1u << (shift - 1);
    return kept + (lost > half || (lost == half && (kept & 1)));
}

WR_BOTH uint16_t to_fp16(float value) {
    uint32_t bits = bits_of(value);
    uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    float magnitude = float_of(bits & 0x7FFFFFFF);
    if (is_nan(value)) return 0x7FFF;
    if (magnitude >= 65520.0f) return sign | 0x7C00;
    int exponent;
    uint32_t units = round_units(magnitude, 10, -14, exponent);
    // The leading one adds one to the exponent field, as does a rounding carry.
    return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + units));
}

// FP8 e4m3 without infinities (Micikevicius et al. 2022): saturates at 448, NaN is 0x7F.
WR_BOTH uint8_t to_e4m3(float value) {
    uint32_t bits = bits_of(value);
    uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
    float magnitude = float_of(bits & 0x7FFFFFFF);
    if (is_nan(value)) return sign | 0x7F;
    if (magnitude >= 448.0f) return sign | 0x7E;
    int exponent;
    uint32_t units = round_units(magnitude, 3, -6, exponent);
    return static_cast<uint8_t>(sign | (((exponent + 6) << 3) + units));
}

WR_BOTH float from_e4m3(uint8_t bits) {
    uint32_t exponent = bits >> 3 & 15, fraction = bits & 7;
    float sign = bits & 0x80 ? -1.0f : 1.0f;
    if ((bits & 0x7F) == 0x7F) return float_of(0x7FFFFFFF);
    if (!exponent) return sign * static_cast<float>(fraction) * 0x1p-9f;
    return sign * float_of((exponent + 120) << 23 | fraction << 20);
}

}  // namespace wr
