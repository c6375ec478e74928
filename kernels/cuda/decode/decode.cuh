// Attention of up to 16 rows, the query heads of a group, over tokens [begin, end) of one KV head:
// what a request has alone, or a few requests share (`shared_decode.cuh`).
//
// Each warp of a CTA takes every fourth tile of 16 tokens through a ring of its own in shared
// memory, with its own online softmax, so that the loop has no barrier of the CTA; `combine` adds
// up the results of warps.
//
// Products are transposed, S^T = K Q^T and O^T = V^T P^T: tokens (scores) and dimensions (output)
// are the 16 rows of the MMA, query heads its 8 columns, so that a group of 8 heads wastes nothing
// and an accumulator of 128 dimensions takes 32 registers. Scores come out with heads in columns; a
// transposition of 8 x 8 makes them the B operand of PV.
#pragma once

#include "dev.cuh"
#include "ring.cuh"

namespace wr::decode {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr float NEVER = -__builtin_inff();

template <int D>
constexpr int MERGE_ROW = D + 4;  // floats: four more, so that lanes write to different banks

// The online softmax of one warp: columns of 8 * COLUMNS heads. A lane has heads 2t and 2t + 1.
template <int D, int COLUMNS>
struct Softmax {
    float out[COLUMNS][D / 16][4] = {};  // C layout: dimensions x heads
    float largest[COLUMNS][2], sum[COLUMNS][2];

    WR_DEV Softmax() {
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++)
            WR_UNROLL
            for (int h = 0; h < 2; h++) {
                largest[n][h] = NEVER;
                sum[n][h] = 0;
            }
    }

    // `scores` (C layout: tokens x heads, base-2 units) become weights; older sums are rescaled.
    WR_DEV void update(float (&scores)[4], int n) {
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            float tile = larger(scores[h], scores[h + 2]);
            tile = larger(tile, shfl_xor(tile, 4));
            tile = larger(tile, shfl_xor(tile, 8));
            tile = larger(tile, shfl_xor(tile, 16));
            float now = larger(largest[n][h], tile);  // finite: a tile has at least one token
            float kept = exp2_fast(largest[n][h] - now);
            largest[n][h] = now;
            scores[h] = exp2_fast(scores[h] - now);
            scores[h + 2] = exp2_fast(scores[h + 2] - now);
            sum[n][h] = sum[n][h] * kept + scores[h] + scores[h + 2];
            WR_UNROLL
            for (int m = 0; m < D / 16; m++) {
                out[n][m][h] *= kept;
                out[n][m][h + 2] *= kept;
            }
        }
    }
};

// The mainloop over 16-bit pages: copies of tiles, and the two products of one.
// `decode_quantized.cuh` has that of bytes.
template <class Type, int DIM>
struct WideTiles {
    using T = Type;
    static constexpr int D = DIM;
    static constexpr bool INTERLEAVED = false;  // the output's rows
    using Pages = wr::Pages;
    using Tiles = Ring<D, WARPS>;

    static WR_DEV Tiles tiles(const Pages& pages, const int32_t* table, int kv_head, char* stages,
                              int begin, int end, int count) {
        return {pages, table, pages.kv_head * kv_head, stages, begin, end, count};
    }

    // Q as the B operand: [16 dimensions][8 rows] fragments. `row_of` tells where a row of
    // Q is; null: zeros.
    template <int COLUMNS, class RowOf>
    static WR_DEV void load_q(const RowOf& row_of, uint32_t (&q)[COLUMNS][D / 16][2]) {
        int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++) {
            const uint16_t* row = row_of(n * 8 + g);
            WR_UNROLL
            for (int k = 0; k < D / 16; k++)
                WR_UNROLL
                for (int half = 0; half < 2; half++) {
                    int at = 2 * t + 16 * k + 8 * half;
                    q[n][k][half] = row ? load(reinterpret_cast<const uint32_t*>(row + at)) : 0;
                }
        }
    }

    template <int COLUMNS>
    static WR_DEV void attend(const Tiles& tiles, int number, float scale_log2,
                              const uint32_t (&q)[COLUMNS][D / 16][2],
                              Softmax<D, COLUMNS>& softmax) {
        char* tile = tiles.stage(number);
        int l = static_cast<int>(lane()), left = tiles.end - tiles.token_of(number);
        float scores[COLUMNS][4] = {};
        WR_UNROLL
        for (int k = 0; k < D / 16; k++) {
            uint32_t keys[4];
            load_matrices(keys, at_swizzled<D>(tile, l % 16, 2 * k + l / 16));
            WR_UNROLL
            for (int n = 0; n < COLUMNS; n++) mma<T>(scores[n], keys, q[n][k]);
        }
        uint32_t weights[COLUMNS][2];
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++) {
            WR_UNROLL
            for (int i = 0; i < 4; i++)
                scores[n][i] = l / 4 + i / 2 * 8 < left ? scores[n][i] * scale_log2 : NEVER;
            softmax.update(scores[n], n);
            weights[n][0] = transpose(pack<T>(scores[n][0], scores[n][1]));
            weights[n][1] = transpose(pack<T>(scores[n][2], scores[n][3]));
        }
        char* values_tile = tile + TILE * D * 2;
        WR_UNROLL
        for (int m = 0; m < D / 16; m++) {
            uint32_t values[4];
            char* row = at_swizzled<D>(values_tile, l % 8 + l / 16 * 8, 2 * m + l / 8 % 2);
            load_matrices_transposed(values, row);
            WR_UNROLL
            for (int n = 0; n < COLUMNS; n++) mma<T>(softmax.out[n][m], values, weights[n]);
        }
    }
};

// Stores one warp's result in shared memory for `combine`: out [head][MERGE_ROW], then largest and
// sum [head].
// Rows g and g + 8 of an output tile are those dimensions, or 2g and 2g + 1 where INTERLEAVED.
template <int D, int COLUMNS, bool INTERLEAVED = false>
WR_DEV void store_warp_result(float* own, Softmax<D, COLUMNS>& softmax) {
    int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    float* ends = own + 8 * COLUMNS * MERGE_ROW<D>;
    WR_UNROLL
    for (int n = 0; n < COLUMNS; n++)
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int head = 8 * n + 2 * t + h;
            float sum = softmax.sum[n][h];
            sum += shfl_xor(sum, 4);
            sum += shfl_xor(sum, 8);
            sum += shfl_xor(sum, 16);
            WR_UNROLL
            for (int m = 0; m < D / 16; m++) {
                float* row = own + head * MERGE_ROW<D> + 16 * m + (INTERLEAVED ? 2 * g : g);
                store_shared(row, softmax.out[n][m][h]);
                store_shared(row + (INTERLEAVED ? 1 : 8), softmax.out[n][m][h + 2]);
            }
            if (g == 0) {
                store_shared(ends + head, softmax.largest[n][h]);
                store_shared(ends + 8 * COLUMNS + head, sum);
            }
        }
}

// Four dimensions of one head, of all warps' results, normalized. Gives the log-sum-exp, base 2.
template <int D, int COLUMNS>
WR_DEV float combine(const float* all, int head, int quad, float (&out)[4]) {
    constexpr int WARP_FLOATS = 8 * COLUMNS * (MERGE_ROW<D> + 2);
    const float* ends = all + 8 * COLUMNS * MERGE_ROW<D> + head;
    float largest = NEVER, sum = 0;
    WR_UNROLL
    for (int w = 0; w < WARPS; w++)
        largest = larger(largest, load_shared(ends + w * WARP_FLOATS));
    WR_UNROLL
    for (int w = 0; w < WARPS; w++) {
        float own = load_shared(ends + w * WARP_FLOATS);
        if (own == NEVER) continue;  // a warp without tiles
        float weight = exp2_fast(own - largest);
        sum += weight * load_shared(ends + w * WARP_FLOATS + 8 * COLUMNS);
        const float* row = all + w * WARP_FLOATS + head * MERGE_ROW<D> + 4 * quad;
        Words4 words = load_shared(reinterpret_cast<const Words4*>(row));
        WR_UNROLL
        for (int i = 0; i < 4; i++) out[i] += weight * float_of(words.w[i]);
    }
    float scale = sum > 0 || is_nan(sum) ? 1 / sum : 0;  // no token: zeros
    WR_UNROLL
    for (int i = 0; i < 4; i++) out[i] *= scale;
    return largest + log2_fast(sum);
}

// Four dimensions of a result: as the output, or as a partial result to be merged.
template <class T>
WR_DEV void store_out(uint16_t* to, const float (&out)[4]) {
    Words2 packed{{pack<T>(out[0], out[1]), pack<T>(out[2], out[3])}};
    store(reinterpret_cast<Words2*>(to), packed);
}
WR_DEV void store_partial(float* to, const float (&out)[4]) {
    Words4 words{{bits_of(out[0]), bits_of(out[1]), bits_of(out[2]), bits_of(out[3])}};
    store(reinterpret_cast<Words4*>(to), words);
}

// Attends to tokens [begin, end) for one KV head. Returns all warps' results, in shared memory.
template <class Mainloop, int COLUMNS, class RowOf>
WR_DEV const float* attend(const typename Mainloop::Pages& pages, const int32_t* table, int kv_head,
                           int begin, int end, float scale_log2, const RowOf& row_of) {
    constexpr int D = Mainloop::D;
    using Tiles = typename Mainloop::Tiles;
    int w = static_cast<int>(warp()), tiles_there = (end - begin + TILE - 1) / TILE;
    Tiles tiles = Mainloop::tiles(pages, table, kv_head, shared() + w * Tiles::BYTES,
                                  begin + w * TILE, end, (tiles_there - w + WARPS - 1) / WARPS);
    WR_UNROLL
    for (int tile = 0; tile < Tiles::AHEAD; tile++) tiles.fetch(tile);
    uint32_t q[COLUMNS][D / 16][2];
    Mainloop::load_q(row_of, q);
    Softmax<D, COLUMNS> softmax;
    for (int tile = 0; tile < tiles.count; tile++) {
        wait_async<Tiles::AHEAD - 1>();
        sync_warp();  // this tile is there for all lanes, and all are done with the one before
        tiles.fetch(tile + Tiles::AHEAD);
        Mainloop::attend(tiles, tile, scale_log2, q, softmax);
    }
    wait_async<0>();
    sync_cta();  // the rings are free for the results
    float* all = reinterpret_cast<float*>(shared());
    store_warp_result<D, COLUMNS, Mainloop::INTERLEAVED>(
        all + w * 8 * COLUMNS * (MERGE_ROW<D> + 2), softmax);
    sync_cta();
    return all;
}

template <class Mainloop>
constexpr int SHARED_BYTES = WARPS * Mainloop::Tiles::BYTES;

}  // namespace wr::decode
