// Many rows, all keys: how prefill, and shared decode where many share, use shared memory and MMAs.
//
// FlashAttention-2's division of work (Dao 2023): each of four warps has 32 rows and all keys,
// warps exchange nothing but the tiles. 32 rows and not 16, since every warp reads the whole
// tile from shared memory: that is 14 FLOP for each byte read with 16 rows, 26 with 32.
#pragma once

#include "dev.cuh"
#include "ring.cuh"

namespace wr::prefill {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int HALVES = 2;  // of a warp's rows: one MMA has 16
constexpr int WARP_ROWS = 16 * HALVES, ROWS = WARPS * WARP_ROWS;
constexpr int KEYS = WARPS * TILE;  // tokens at once: a tile of each warp's ring
constexpr int DEPTH = 2;            // of the rings
constexpr float NEVER = -__builtin_inff();

template <int D>
constexpr int Q_BYTES = ROWS * D * 2;
template <int D>
constexpr int RING_BYTES = DEPTH * STAGE_BYTES<D>;

// K and V of a KV head from token `begin` on, KEYS at a time, out of 16-bit pages: each warp brings
// a tile of them. `prefill_quantized.cuh` has the same of bytes.
template <int DIM>
struct WideKeys {
    static constexpr int D = DIM, BYTES = WARPS * RING_BYTES<D>;
    // Whose scores are in registers together: in prefill, and in shared decode, whose walk over
    // items needs registers, too.
    static constexpr int AT_ONCE = KEYS, AT_ONCE_IN_WALK = KEYS / 2;
    using Pages = wr::Pages;

    char* rings;  // BYTES, of the CTA
    Ring<D, WARPS, DEPTH> own;

    WR_DEV WideKeys(const Pages& pages, const int32_t* table, int kv_head, int begin, int end,
                    char* memory)
        : rings(memory),
          own{pages,
              table,
              kv_head * pages.kv_head,
              memory + static_cast<int>(warp()) * RING_BYTES<D>,
              begin + static_cast<int>(warp()) * TILE,
              end,
              (end - begin + KEYS - 1) / KEYS} {}

    WR_DEV int steps() const { return own.count; }
    // Tokens before the end, from the step's first on.
    WR_DEV int left(int step) const {
        return own.end - own.token_of(step) + static_cast<int>(warp()) * TILE;
    }
    WR_DEV void fetch(int step) { own.fetch(step); }
    // What is left to do with a warp's own copies before others read them.
    WR_DEV void finish(int) const {}
    // Tiles lie RING_BYTES<D> apart.
    WR_DEV char* stage(int step) const { return rings + step % DEPTH * STAGE_BYTES<D>; }
    // Scores, or weights, times the scales of their tokens: of the step's tiles from `tile` on.
    template <int COLUMNS>
    WR_DEV void scale_scores(float (&)[HALVES][COLUMNS][4], int, int) const {}
    template <int COLUMNS>
    WR_DEV void scale_weights(float (&)[HALVES][COLUMNS][4], int, int) const {}
};

template <class Keys>
constexpr int SHARED_BYTES = Q_BYTES<Keys::D> + Keys::BYTES;

// The online softmax of a warp. Lane 4g + t has of half m the rows g (h = 0) and g + 8 (h = 1).
template <int D>
struct Softmax {
    float out[HALVES][D / 8][4] = {};  // C layout
    float largest[HALVES][2], sum[HALVES][2];

    WR_DEV Softmax() {
        WR_UNROLL
        for (int m = 0; m < HALVES; m++)
            WR_UNROLL
            for (int h = 0; h < 2; h++) {
                largest[m][h] = NEVER;
                sum[m][h] = 0;
            }
    }

    // `scores` become weights; older sums are rescaled. Every row sees a token of the first keys,
    // so that its largest score is one of a token that it sees.
    template <int COLUMNS>
    WR_DEV void update(float (&scores)[HALVES][COLUMNS][4], float scale_log2) {
        WR_UNROLL
        for (int m = 0; m < HALVES; m++)
            WR_UNROLL
            for (int h = 0; h < 2; h++) {
                float now = largest[m][h];
                WR_UNROLL
                for (int n = 0; n < COLUMNS; n++)
                    now = larger(now, larger(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
                now = larger(now, shfl_xor(now, 1));
                now = larger(now, shfl_xor(now, 2));
                float kept = exp2_fast((largest[m][h] - now) * scale_log2);
                largest[m][h] = now;
                float shift = now * scale_log2, added = 0;
                WR_UNROLL
                for (int n = 0; n < COLUMNS; n++)
                    WR_UNROLL
                    for (int i = 2 * h; i < 2 * h + 2; i++) {
                        scores[m][n][i] = exp2_fast(scores[m][n][i] * scale_log2 - shift);
                        added += scores[m][n][i];
                    }
                sum[m][h] = sum[m][h] * kept + added;
                WR_UNROLL
                for (int n = 0; n < D / 8; n++) {
                    out[m][n][2 * h] *= kept;
                    out[m][n][2 * h + 1] *= kept;
                }
            }
    }
};

// S = Q K^T of 8 * COLUMNS keys, in the tiles of rings from `stage` on.
template <class T, int D, int COLUMNS>
WR_DEV void multiply_qk(char* queries, char* stage, float (&scores)[HALVES][COLUMNS][4]) {
    int l = static_cast<int>(lane());
    WR_UNROLL_BY(4)  // all eight at once need more registers than there are
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[HALVES][4];
        WR_UNROLL
        for (int m = 0; m < HALVES; m++)
            load_matrices(a[m], at_swizzled<D>(queries, 16 * m + l % 16, 2 * k + l / 16));
        WR_UNROLL
        for (int n = 0; n < COLUMNS / 2; n++) {
            uint32_t b[4];
            char* keys = stage + n * RING_BYTES<D>;
            load_matrices(b, at_swizzled<D>(keys, l / 16 * 8 + l % 8, 2 * k + l / 8 % 2));
            const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
            WR_UNROLL
            for (int m = 0; m < HALVES; m++) {
                mma<T>(scores[m][2 * n], a[m], first);
                mma<T>(scores[m][2 * n + 1], a[m], second);
            }
        }
    }
}

// O += P V.
template <class T, int D, int COLUMNS>
WR_DEV void multiply_pv(const float (&weights)[HALVES][COLUMNS][4], char* stage,
                        float (&out)[HALVES][D / 8][4]) {
    int l = static_cast<int>(lane());
    WR_UNROLL
    for (int k = 0; k < COLUMNS / 2; k++) {
        uint32_t a[HALVES][4];
        WR_UNROLL
        for (int m = 0; m < HALVES; m++)
            WR_UNROLL
            for (int i = 0; i < 4; i++) {
                const float* pair = &weights[m][2 * k + i / 2][i % 2 * 2];
                a[m][i] = pack<T>(pair[0], pair[1]);
            }
        WR_UNROLL
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            char* values = stage + k * RING_BYTES<D> + TILE * D * 2;
            load_matrices_transposed(b, at_swizzled<D>(values, l % 16, 2 * n + l / 16));
            const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
            WR_UNROLL
            for (int m = 0; m < HALVES; m++) {
                mma<T>(out[m][2 * n], a[m], first);
                mma<T>(out[m][2 * n + 1], a[m], second);
            }
        }
    }
}

}  // namespace wr::prefill
