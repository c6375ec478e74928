// Prefill over quantized pages: `prefill.cuh` with tiles of bytes, made 16-bit ones in shared
// memory. On Hopper: `prefill_wgmma_quantized.cuh`.
//
// All warps read every tile, so that widening it in registers, as `decode_quantized.cuh` does,
// would be done four times. Here the warp that has brought a tile widens it, once, into the place
// where a 16-bit page's tile would have come: products read it there and do not know. Bytes are
// there once, wide tiles twice, so that one barrier a step is still enough: while tile s is read,
// the bytes of s + 1 are under way, and the place of its wide tile was last read before the
// barrier.
//
// A key's scale goes into its score, a value's into its weight, as in `decode_quantized.cuh`.
#pragma once

#include "byte_ring.cuh"
#include "prefill/prefill.cuh"
#include "prefill/prefill_tiles.cuh"
#include "widen.cuh"

namespace wr::prefill_quantized {

using namespace prefill;

// Host side: checked arguments, `stored` an 8-bit Dtype of `abi.h`.
void launch_stored(bool is_bf16, int32_t stored, int64_t head_dim, int64_t items,
                const ParamsOver<BytePages>& params, void* stream);

template <class T, class Stored, int DIM>
struct WidenedKeys {
    static constexpr int D = DIM;
    using Pages = BytePages;
    using OwnBytes = ByteRing<D, WARPS, 1, DEPTH>;
    static constexpr int BYTES = WARPS * (RING_BYTES<D> + OwnBytes::BYTES);
    static constexpr int AT_ONCE = D == 64 ? KEYS : KEYS / 2;  // more spill at 128 (nvcc 13.0)
    static constexpr int AT_ONCE_IN_WALK = AT_ONCE / 2;

    char* wide;  // BYTES, of the CTA: as WideKeys has them, then the rings of bytes
    OwnBytes own;

    WR_DEV WidenedKeys(const Pages& pages, const int32_t* table, int kv_head, int begin, int end,
                       char* memory)
        : wide(memory),
          own{pages,
              table,
              kv_head,
              memory + WARPS * RING_BYTES<D> + static_cast<int>(warp()) * OwnBytes::BYTES,
              begin + static_cast<int>(warp()) * TILE,
              end,
              (end - begin + KEYS - 1) / KEYS} {}

    WR_DEV int steps() const { return own.count; }
    WR_DEV int left(int step) const {
        return own.end - own.token_of(step) + static_cast<int>(warp()) * TILE;
    }
    WR_DEV void fetch(int step) { own.fetch(step); }
    WR_DEV char* stage(int step) const { return wide + step % DEPTH * STAGE_BYTES<D>; }

    // Widens a warp's own tile: eight bytes a lane and turn, which become sixteen.
    WR_DEV void finish(int step) const {
        constexpr int LANES = D / 8, ROWS_AT_ONCE = 32 / LANES;
        int l = static_cast<int>(lane()), eighth = l % LANES;
        char *bytes = own.stage(step), *to = stage(step) + static_cast<int>(warp()) * RING_BYTES<D>;
        sync_warp();  // what other lanes have copied is there
        WR_UNROLL_BY(2)  // shared decode spills with all at once
        for (int turn = 0; turn < TILE; turn += ROWS_AT_ONCE) {
            int row = turn + l / LANES, half = eighth % 2 * 8;
            widen_eight(key_at<D>(bytes, row, eighth / 2) + half, at_swizzled<D>(to, row, eighth));
            widen_eight(value_at<D>(bytes, row, eighth / 2) + half,
                        at_swizzled<D>(to + TILE * D * 2, row, eighth));
        }
        // Beyond the last token a page may have anything for a scale: its score is hidden, but a
        // weight of zero times NaN is NaN.
        if (l < TILE && l >= own.end - own.token_of(step))
            store_shared(own.scales(step) + TILE + l, 0.0f);
    }

    static WR_DEV void widen_eight(const char* bytes, char* to) {
        Words2 words = load_shared(reinterpret_cast<const Words2*>(bytes));
        Words4 wider;
        WR_UNROLL
        for (int i = 0; i < 2; i++)
            widen_in_order<T>(Stored{}, words.w[i], wider.w[2 * i], wider.w[2 * i + 1]);
        store_shared(reinterpret_cast<Words4*>(to), wider);
    }

    template <int COLUMNS>
    WR_DEV void scale_scores(float (&scores)[HALVES][COLUMNS][4], int step, int tile) const {
        scale(scores, step, tile, 0);
    }
    template <int COLUMNS>
    WR_DEV void scale_weights(float (&weights)[HALVES][COLUMNS][4], int step, int tile) const {
        scale(weights, step, tile, TILE);
    }

    // Columns 2t and 2t + 1 of each eight are a lane's; `kind` is 0 for K, TILE for V.
    template <int COLUMNS>
    WR_DEV void scale(float (&x)[HALVES][COLUMNS][4], int step, int tile, int kind) const {
        int t = static_cast<int>(lane()) % 4;
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++) {
            OwnBytes its = own;  // but of the warp that has brought this tile
            its.stages = wide + WARPS * RING_BYTES<D> + (tile + n / 2) * OwnBytes::BYTES;
            const float* pair = its.scales(step) + kind + n % 2 * 8 + 2 * t;
            Words2 words = load_shared(reinterpret_cast<const Words2*>(pair));
            WR_UNROLL
            for (int i = 0; i < 2; i++) {
                float by = float_of(words.w[i]) * UNIT<T>;
                WR_UNROLL
                for (int m = 0; m < HALVES; m++) {
                    x[m][n][i] *= by;
                    x[m][n][i + 2] *= by;
                }
            }
        }
    }
};

template <class T, class Stored, int D, bool IS_CUT>
WR_KERNEL(THREADS, 2) kernel(WR_PARAMS ParamsOver<BytePages> p) {
    run<T, WidenedKeys<T, Stored, D>, IS_CUT>(p);
}

}  // namespace wr::prefill_quantized
