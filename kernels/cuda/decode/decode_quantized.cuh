// `decode.cuh` over quantized pages: tiles of bytes, widened to operands in registers.
//
// A key's scale goes into its score, a value's into its weight, so that no element is multiplied.
// Dimensions of the first product and rows of the second are in an order that suits the bytes: lane
// t of four has 16 neighbouring dimensions of a key, and rows g and g + 8 of an output tile are the
// dimensions 2g and 2g + 1.
#pragma once

#include "byte_ring.cuh"
#include "decode/decode.cuh"
#include "widen.cuh"

namespace wr::decode_quantized {

using namespace decode;

template <class Type, class Stored, int DIM>
struct ByteTiles {
    using T = Type;
    static constexpr int D = DIM;
    static constexpr bool INTERLEAVED = true;  // the output's rows
    using Pages = BytePages;
    using Tiles = ByteRing<D, WARPS>;

    static WR_DEV Tiles tiles(const Pages& pages, const int32_t* table, int kv_head, char* stages,
                              int begin, int end, int count) {
        return {pages, table, kv_head, stages, begin, end, count};
    }

    // Q as the B operand: step 4i + j has of lane t the dimensions 64i + 16t + 4j and on.
    template <int COLUMNS, class RowOf>
    static WR_DEV void load_q(const RowOf& row_of, uint32_t (&q)[COLUMNS][D / 16][2]) {
        int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++) {
            const uint16_t* row = row_of(n * 8 + g);
            WR_UNROLL
            for (int k = 0; k < D / 16; k++) {
                int at = 16 * t + 64 * (k / 4) + 4 * (k % 4);
                Words2 words = row ? load(reinterpret_cast<const Words2*>(row + at)) : Words2{};
                part(words.w[0], words.w[1], q[n][k][0], q[n][k][1]);
            }
        }
    }

    template <int COLUMNS>
    static WR_DEV void attend(const Tiles& tiles, int number, float scale_log2,
                              const uint32_t (&q)[COLUMNS][D / 16][2],
                              Softmax<D, COLUMNS>& softmax) {
        char* tile = tiles.stage(number);
        int g = static_cast<int>(lane()) / 4, left = tiles.end - tiles.token_of(number);
        float scores[COLUMNS][4] = {};
        multiply_qk(tile, q, scores);
        float key_scale[2], value_scale[2];
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            const float* scales = tiles.scales(number) + g + 8 * h;
            key_scale[h] = load_shared(scales) * (scale_log2 * UNIT<T>);
            // Beyond the last token a page may have anything for a scale.
            value_scale[h] = g + 8 * h < left ? load_shared(scales + TILE) * UNIT<T> : 0;
        }
        uint32_t weights[COLUMNS][2];
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++) {
            WR_UNROLL
            for (int i = 0; i < 4; i++)
                scores[n][i] = g + i / 2 * 8 < left ? scores[n][i] * key_scale[i / 2] : NEVER;
            softmax.update(scores[n], n);
            WR_UNROLL
            for (int h = 0; h < 2; h++)
                weights[n][h] = transpose(pack<T>(scores[n][2 * h] * value_scale[h],
                                                  scores[n][2 * h + 1] * value_scale[h]));
        }
        multiply_pv(tile, weights, softmax);
    }

    template <int COLUMNS>
    static WR_DEV void multiply_qk(char* tile, const uint32_t (&q)[COLUMNS][D / 16][2],
                                   float (&scores)[COLUMNS][4]) {
        int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
        WR_UNROLL
        for (int i = 0; i < D / 64; i++) {
            int chunk = t + 4 * i;
            Words4 first = load_shared(reinterpret_cast<Words4*>(key_at<D>(tile, g, chunk)));
            Words4 second = load_shared(reinterpret_cast<Words4*>(key_at<D>(tile, g + 8, chunk)));
            WR_UNROLL
            for (int j = 0; j < 4; j++) {
                uint32_t keys[4];
                widen<T>(Stored{}, first.w[j], keys[0], keys[2]);
                widen<T>(Stored{}, second.w[j], keys[1], keys[3]);
                WR_UNROLL
                for (int n = 0; n < COLUMNS; n++) mma<T>(scores[n], keys, q[n][4 * i + j]);
            }
        }
    }

    template <int COLUMNS>
    static WR_DEV void multiply_pv(char* tile, const uint32_t (&weights)[COLUMNS][2],
                                   Softmax<D, COLUMNS>& softmax) {
        int l = static_cast<int>(lane());
        WR_UNROLL
        for (int pair = 0; pair < D / 32; pair++) {
            uint32_t bytes[4];  // [16 dimensions][8 tokens] of two chunks
            load_matrices_transposed(
                bytes, value_at<D>(tile, l % 8 + l / 8 % 2 * 8, 2 * pair + l / 16));
            WR_UNROLL
            for (int chunk = 0; chunk < 2; chunk++) {
                uint32_t values[4];
                widen<T>(Stored{}, bytes[2 * chunk], values[0], values[1]);
                widen<T>(Stored{}, bytes[2 * chunk + 1], values[2], values[3]);
                WR_UNROLL
                for (int n = 0; n < COLUMNS; n++)
                    mma<T>(softmax.out[n][2 * pair + chunk], values, weights[n]);
            }
        }
    }
};

}  // namespace wr::decode_quantized
