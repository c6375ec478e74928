// Bytes of quantized numbers as pairs of 16-bit floats, without a conversion instruction.
//
// Four bytes become the pairs of the even and of the odd ones: where bytes are, masks reach them
// without moving them, and the order within a sum is free. Numbers come out divided by UNIT, which
// goes into their scale. INT8 in bf16: 128 + (b & 127) - (128 + (b & 128)), each a bf16 by its bit
// pattern; in fp16: the byte below the exponent of 4, where an ulp is 2^-8. FP8 e4m3: its exponent
// in the wider field is 2^-8 (fp16) or 2^-120 (bf16) of what it was, subnormals included; its NaN
// becomes 480, since a row with NaN has a NaN for its scale.
#pragma once

#include "dev.cuh"

namespace wr {

struct Int8 {};
struct E4m3 {};

WR_DEV uint32_t swap_middle_bytes(uint32_t word) {
    return (word & 0xFF0000FF) | (word & 0xFF00) << 8 | (word >> 8 & 0xFF00);
}

template <class T>
constexpr float UNIT = T::IS_BF16 ? 1.0f : 256.0f;

template <class T>
WR_DEV uint32_t widen_pair(Int8, uint32_t bytes) {  // in the lower halves
    if constexpr (T::IS_BF16) {
        uint32_t low = masked_or<0x007F007F>(bytes, 0x43004300);
        uint32_t high = masked_or<0x00800080>(bytes, 0xC300C300);
        return multiply_add<T>(low, 0x3F803F80, high);  // low * 1 + high
    } else {
        // 4 + (b + 128) / 256: the sign bit turned round.
        uint32_t biased = masked_or<0x00FF00FF>(bytes ^ 0x00800080, 0x44004400);
        return multiply_add<T>(biased, 0x3C003C00, 0xC480C480);
    }
}

template <class T>
WR_DEV uint32_t widen_pair(E4m3, uint32_t bytes) {  // in the lower halves
    uint32_t sign = bytes << 8 & 0x80008000;
    if constexpr (T::IS_BF16) {
        uint32_t small = masked_or<0x07F007F0>(bytes << 4, sign);
        return multiply_add<T>(small, 0x7B807B80, 0x80008000);  // times 2^120
    } else {
        return masked_or<0x3F803F80>(bytes << 7, sign);
    }
}

template <class T, class Stored>
WR_DEV void widen(Stored stored, uint32_t bytes, uint32_t& even, uint32_t& odd) {
    even = widen_pair<T>(stored, bytes);
    odd = widen_pair<T>(stored, bytes >> 8);
}

// The same for bytes whose order counts: (0, 1) and (2, 3), for one byte permutation more.
template <class T, class Stored>
WR_DEV void widen_in_order(Stored stored, uint32_t bytes, uint32_t& first, uint32_t& second) {
    widen<T>(stored, swap_middle_bytes(bytes), first, second);
}

// Pairs (0, 1) and (2, 3) of 16-bit values as (0, 2) and (1, 3): what meets even and odd bytes.
WR_DEV void part(uint32_t first, uint32_t second, uint32_t& even, uint32_t& odd) {
    even = (first & 0xFFFF) | second << 16;
    odd = first >> 16 | (second & 0xFFFF0000);
}

}  // namespace wr
