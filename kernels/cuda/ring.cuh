// K and V of a run of tokens, tile by tile out of their pages into one warp's ring in shared
// memory.
//
// A multistage pipeline of cp.async: all stages but one are in flight. A warp waits for its own
// copies only.
#pragma once

#include "dev.cuh"

namespace wr {

constexpr int TILE = 16;  // tokens; pages hold whole tiles
template <int D>
constexpr int STAGES = D == 64 ? 6 : 3;  // 24 KiB a warp either way
template <int D>
constexpr int STAGE_BYTES = 2 * TILE * D * 2;  // K, then V

// One layer's pages: [page, token, kv head, D], of K and V with the same strides, in elements.
struct Pages {
    const uint16_t *k, *v;
    int64_t page, token, kv_head;
    int32_t tiles_per_page;
};

// Where row `row`, 16-byte chunk `chunk` of a tile lies: the XOR swizzle by which the eight rows of
// an ldmatrix lie in different banks.
template <int D>
WR_DEV char* at_swizzled(char* tile, int row, int chunk) {
    return tile + row * D * 2 + (chunk ^ (row & 7)) * 16;
}

// Every STEP-th tile of one KV head from token `begin` (a multiple of TILE) on: `count` of them,
// DEPTH at once. What is not before `end` becomes zeros.
template <int D, int STEP, int DEPTH = STAGES<D>>
struct Ring {
    static constexpr int AHEAD = DEPTH - 1;  // tiles in flight while one is used
    static constexpr int BYTES = DEPTH * STAGE_BYTES<D>;

    const Pages& pages;
    const int32_t* table;  // page of each `tiles_per_page` tiles of the request
    int64_t head;          // offset of the KV head, in elements
    char* stages;          // BYTES, written by this warp alone
    int begin, end, count;
    int64_t ahead = 0;  // lane l: where tile (window + l) is, in elements

    WR_DEV int token_of(int tile) const { return begin + tile * STEP * TILE; }
    WR_DEV char* stage(int tile) const { return stages + tile % DEPTH * STAGE_BYTES<D>; }

    // Looks up the pages of 32 tiles at once, one a lane.
    WR_DEV void look_up(int window) {
        int token = token_of(window + static_cast<int>(lane()));
        if (token >= end) return;
        uint32_t number = static_cast<uint32_t>(token) / TILE;
        uint32_t per_page = static_cast<uint32_t>(pages.tiles_per_page);
        int64_t page = load(table + number / per_page);
        ahead = head + page * pages.page +
                static_cast<int64_t>(number % per_page) * TILE * pages.token;
    }

    // Issues the copies of one tile's K and V, and commits their group.
    WR_DEV void fetch(int tile) {
        if (tile % 32 == 0) look_up(tile);
        if (tile < count) {
            int64_t offset = shfl(ahead, static_cast<unsigned>(tile) % 32);
            constexpr int CHUNKS = D / 8, ROWS = 32 / CHUNKS;
            int chunk = static_cast<int>(lane()) % CHUNKS, row = static_cast<int>(lane()) / CHUNKS;
            int left = end - token_of(tile);
            char* to = stage(tile);
            offset += row * pages.token + chunk * 8;
            WR_UNROLL
            for (int step = 0; step < TILE; step += ROWS) {
                char* target = at_swizzled<D>(to, row + step, chunk);
                bool keep = row + step < left;
                int64_t from = offset + step * pages.token;
                copy_async(target, pages.k + from, keep);
                copy_async(target + TILE * D * 2, pages.v + from, keep);
            }
        }
        commit_async();
    }
};

}  // namespace wr
