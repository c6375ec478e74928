// What warp operations compute, lane by lane. Fragment layouts: PTX ISA 8.8, sections on
// `mma.m16n8k16`, `ldmatrix` and `movmatrix`.

#include <cmath>
#include <cstring>

#include "emulator/emu.h"
#include "numbers.h"

namespace wr::emu {

void shuffle(const void* const* in, void* const* out) {
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned from = static_cast<const ShuffleIn*>(in[lane])->from % 32;
        *static_cast<uint32_t*>(out[lane]) = static_cast<const ShuffleIn*>(in[from])->bits;
    }
}

void load_matrices(const void* const* in, void* const* out) {
    uint16_t values[4][8][8];
    for (unsigned lane = 0; lane < 32; lane++)
        memcpy(values[lane / 8][lane % 8], static_cast<const MatricesIn*>(in[lane])->row, 16);
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned m = 0; m < 4; m++) {
            unsigned row = lane / 4, column = lane % 4 * 2;
            bool turn = static_cast<const MatricesIn*>(in[lane])->transposed;
            uint32_t low = turn ? values[m][column][row] : values[m][row][column];
            uint32_t high = turn ? values[m][column + 1][row] : values[m][row][column + 1];
            static_cast<uint32_t*>(out[lane])[m] = low | high << 16;
        }
}

void transpose(const void* const* in, void* const* out) {
    uint16_t values[8][8];
    for (unsigned lane = 0; lane < 32; lane++)
        memcpy(&values[lane / 4][lane % 4 * 2], in[lane], 4);
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned row = lane / 4, column = lane % 4 * 2;
        *static_cast<uint32_t*>(out[lane]) = values[column][row] | values[column + 1][row] << 16;
    }
}

void multiply(const void* const* in, void* const* out) {
    static thread_local float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        const auto& own = *static_cast<const MultiplyIn*>(in[lane]);
        unsigned group = lane / 4, pair = lane % 4 * 2;
        for (unsigned half = 0; half < 2; half++) {
            auto value = [&](uint32_t word) {
                uint16_t bits = static_cast<uint16_t>(word >> (16 * half));
                return own.is_bf16 ? from_bf16(bits) : from_fp16(bits);
            };
            for (unsigned r = 0; r < 4; r++)
                a[group + r % 2 * 8][pair + half + r / 2 * 8] = value(own.a[r]);
            for (unsigned r = 0; r < 2; r++) b[pair + half + r * 8][group] = value(own.b[r]);
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        const auto& own = *static_cast<const MultiplyIn*>(in[lane]);
        for (unsigned r = 0; r < 4; r++) {
            unsigned row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
            float sum = own.c[r];
            for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            static_cast<float*>(out[lane])[r] = sum;
        }
    }
}

}  // namespace wr::emu
