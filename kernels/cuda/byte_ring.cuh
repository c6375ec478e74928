// Quantized K and V of a run of tokens, with their scales, tile by tile into one warp's ring: what
// `ring.cuh` does for 16-bit pages.
#pragma once

#include "dev.cuh"
#include "ring.cuh"

namespace wr {

// One layer's pages: [page, token, kv head, D], a byte each, of K and V with the same strides; and
// scales [page, token, kv head], the tokens of a page and head side by side.
struct BytePages {
    const uint8_t *k, *v;
    int64_t page, token, kv_head;
    const float *k_scales, *v_scales;
    int64_t scale_page, scale_kv_head;
    int32_t tiles_per_page;
};

template <int D>
constexpr int BYTE_STAGES = D == 64 ? 10 : 5;  // 21 KiB a warp either way
template <int D>
constexpr int BYTE_STAGE_BYTES = 2 * TILE * D;    // K, then V
constexpr int SCALE_STAGE_BYTES = 2 * TILE * 4;  // of K, then of V

// Where 16 bytes of a row lie. K is read two rows of four chunks at once, V eight rows of one.
template <int D>
WR_DEV char* key_at(char* tile, int row, int chunk) {
    return tile + row * D + (D == 64 ? chunk : chunk ^ (row & 1) << 2) * 16;
}
template <int D>
WR_DEV char* value_at(char* tile, int row, int chunk) {
    int swizzle = D == 64 ? row >> 1 & 3 : row & 7;
    return tile + TILE * D + row * D + (chunk ^ swizzle) * 16;
}

// Every STEP-th tile of one KV head from token `begin` (a multiple of TILE) on: `count` of them,
// DEPTH at once, and the scales of SCALE_DEPTH. K and V of tokens that are not before `end` become
// zeros; their scales are as the page has them, in a tile with none before it zeros.
template <int D, int STEP, int DEPTH = BYTE_STAGES<D>, int SCALE_DEPTH = DEPTH>
struct ByteRing {
    static constexpr int AHEAD = DEPTH - 1;  // tiles in flight while one is used
    static constexpr int BYTES = DEPTH * BYTE_STAGE_BYTES<D> + SCALE_DEPTH * SCALE_STAGE_BYTES;

    const BytePages& pages;
    const int32_t* table;  // page of each `tiles_per_page` tiles of the request
    int kv_head;
    char* stages;  // BYTES, written by this warp alone
    int begin, end, count;
    uint32_t page = 0, within = 0;  // lane l: of tile window + l, and which tile of its page it is

    WR_DEV int token_of(int tile) const { return begin + tile * STEP * TILE; }
    WR_DEV char* stage(int tile) const { return stages + tile % DEPTH * BYTE_STAGE_BYTES<D>; }
    // Of the tile's tokens: of K, and TILE further those of V.
    WR_DEV float* scales(int tile) const {
        return reinterpret_cast<float*>(stages + DEPTH * BYTE_STAGE_BYTES<D> +
                                        tile % SCALE_DEPTH * SCALE_STAGE_BYTES);
    }

    WR_DEV void look_up(int window) {
        int token = token_of(window + static_cast<int>(lane()));
        if (token >= end) return;
        uint32_t number = static_cast<uint32_t>(token) / TILE;
        uint32_t per_page = static_cast<uint32_t>(pages.tiles_per_page);
        page = static_cast<uint32_t>(load(table + number / per_page));
        within = number % per_page;
    }

    // Issues the copies of one tile, and commits their group.
    WR_DEV void fetch(int tile) {
        if (tile % 32 == 0) look_up(tile);
        if (tile < count) {
            int64_t at_page = shfl(page, static_cast<unsigned>(tile) % 32);
            int64_t token = int64_t{shfl(within, static_cast<unsigned>(tile) % 32)} * TILE;
            constexpr int CHUNKS = D / 16, ROWS = 32 / CHUNKS;
            int l = static_cast<int>(lane()), chunk = l % CHUNKS, row = l / CHUNKS;
            int left = end - token_of(tile);
            char* to = stage(tile);
            int64_t from = at_page * pages.page + (token + row) * pages.token +
                           kv_head * pages.kv_head + chunk * 16;
            WR_UNROLL
            for (int step = 0; step < TILE; step += ROWS) {
                bool keep = row + step < left;
                int64_t offset = from + step * pages.token;
                copy_async(key_at<D>(to, row + step, chunk), pages.k + offset, keep);
                copy_async(value_at<D>(to, row + step, chunk), pages.v + offset, keep);
            }
            int64_t scale = at_page * pages.scale_page + kv_head * pages.scale_kv_head + token;
            if (l < TILE / 2) {  // four lanes for K, four for V, four scales each
                const float* from_scales = l < TILE / 4 ? pages.k_scales : pages.v_scales;
                copy_async(scales(tile) + l * 4, from_scales + scale + l % 4 * 4, left > 0);
            }
        }
        commit_async();
    }
};

}  // namespace wr
