// Prefill for Hopper over quantized pages: `prefill_wgmma.cuh` with stages that the producer warps
// store, widened to 16 bits on the way.
//
// A thread of the producer warpgroup loads 16 bytes of a row at a time, widens them, and stores
// them where a box would have brought them: products read them there and do not know. While bytes
// are stored, those that come 64 rows (D 128) or 128 (D 64) later are loaded into the registers
// that fall free, so that 8 KiB are under way. A key's scale goes into its score, a value's into
// its weight, as in `prefill_quantized.cuh`; scales lie beside their stage.
//
// Bytes beyond the item's last token are numbers, whatever they are, and their scales zero.
#pragma once

#include "prefill/prefill_wgmma_rows.cuh"
#include "widen.cuh"

namespace wr::prefill_wgmma_quantized {

using namespace prefill_wgmma;
using Params = prefill_wgmma::ParamsOver<BytePages>;

// Host side: checked arguments, `stored` an 8-bit Dtype of `abi.h`.
void launch_stored(bool is_bf16, int32_t stored, int64_t head_dim, const Params& params,
                   void* stream);

// Scales of all stages, and where tiles begin.
constexpr int MORE_BYTES = KV_STAGES * KEYS * 4 + PRODUCER_WARPS * 2 * (KEYS / TILE) * 8;

template <class T, class Stored, int D>
struct Widener {
    static constexpr int REGISTERS = 72, CONSUMER_REGISTERS = 216;  // of 168 each at the launch
    static constexpr int CHUNKS = D / 16, WARP_ROWS = 32 / CHUNKS;  // 16 bytes a lane
    static constexpr int ROWS_AT_ONCE = WARP_ROWS * PRODUCER_WARPS, PASSES = KEYS / ROWS_AT_ONCE;
    static constexpr int TILES = KEYS / TILE;
    static constexpr int HELD = 4;  // passes whose bytes are under way, or in registers

    const Params& p;
    const Shared<D>& to;
    int kv_uses = 0;
    Words4 bytes[HELD] = {};

    static WR_DEV void prefetch_maps(const Params& p) { prefetch_map(p.q); }

    WR_DEV void run() {
        for (Walk walk(p); walk.is_there(); walk.next()) {
            if (warp() == 0) fetch_q<D>(p, to, walk);
            Scales scales = find(walk, 0);
            WR_UNROLL
            for (int n = 0; n < HELD; n++) load_bytes(n, p.of.pages.k, 0, n);
            for (int block = 0; block < walk.blocks; block++) {
                fill(scales.k, p.of.pages.k, block, p.of.pages.v, block);
                Scales next = find(walk, block + 1);
                fill(scales.v, p.of.pages.v, block, p.of.pages.k, block + 1);
                scales = next;
            }
        }
    }

    // Where the tiles of this block begin: a warp's own, of this block and the next.
    WR_DEV int64_t* tiles(int block) const {
        auto all = reinterpret_cast<int64_t*>(to.all_scales + KV_STAGES * KEYS);
        return all + (warp() * 2 + static_cast<unsigned>(block) % 2) * TILES;
    }

    struct Scales {
        float k, v;
    };
    // Writes `tiles` of a block of keys. Returns the scales of the key of this thread's number.
    WR_DEV Scales find(const Walk& walk, int block) const {
        const BytePages& pages = p.of.pages;
        int page_tokens = pages.tiles_per_page * TILE, first = walk.item.begin + block * KEYS;
        int token = first + static_cast<int>(lane()) * TILE;
        int page = 0, within = 0;  // beyond the end any bytes do
        if (lane() < TILES && token < walk.item.end) {
            page = load(p.of.page_table + walk.item.request * p.of.table_row + token / page_tokens);
            within = token % page_tokens;
        }
        if (lane() < TILES)
            store_shared(tiles(block) + lane(), page * pages.page + within * pages.token +
                                                    walk.kv_head * pages.kv_head);
        int own = static_cast<int>(thread());
        auto of_own = [own](int x) {
            return static_cast<int>(shfl(static_cast<uint32_t>(x), thread() / TILE));
        };
        int64_t scale = of_own(page) * pages.scale_page + walk.kv_head * pages.scale_kv_head +
                        of_own(within) + own % TILE;
        sync_warp();
        if (first + own >= walk.item.end) return {0, 0};
        return {load(pages.k_scales + scale) * UNIT<T>, load(pages.v_scales + scale) * UNIT<T>};
    }

    // Of this lane among the rows of a pass, and its 16 bytes of it: eight lanes store four even
    // chunks of two neighbouring rows, which lie in different banks.
    static WR_DEV int own_row() {
        int l = static_cast<int>(lane());
        return static_cast<int>(warp()) * WARP_ROWS + l / (2 * CHUNKS) * 2 + l / 4 % 2;
    }
    static WR_DEV int own_chunk() {
        int l = static_cast<int>(lane());
        return l / 8 % (CHUNKS / 4) * 4 + l % 4;
    }

    WR_DEV void load_bytes(int held, const uint8_t* from, int block, int pass) {
        constexpr int WARPS = TILE / WARP_ROWS;  // that have a tile together
        const int64_t* tile = tiles(block) + pass * (PRODUCER_WARPS / WARPS);
        if constexpr (WARPS < PRODUCER_WARPS) tile += warp() / WARPS;
        from += load_shared(tile) + own_row() % TILE * p.of.pages.token + own_chunk() * 16;
        bytes[held] = load_once(reinterpret_cast<const Words4*>(from));
    }

    // Stores the next stage, bytes of `own`, and begins to load those that come `after`.
    WR_DEV void fill(float scale, const uint8_t* own, int block, const uint8_t* after,
                     int block_after) {
        to.kv.wait_empty(kv_uses);
        store_shared(to.scales(kv_uses) + thread(), scale);
        WR_UNROLL_BY(1)
        for (int first = 0; first < PASSES; first += HELD) {
            bool is_last = first + HELD == PASSES;
            WR_UNROLL
            for (int n = 0; n < HELD; n++) {
                store_wide(bytes[n], first + n);
                load_bytes(n, is_last ? after : own, is_last ? block_after : block,
                           is_last ? n : first + HELD + n);
            }
        }
        fence_async();
        sync_warp();
        if (lane() == 0) arrive(to.kv.full_barrier(kv_uses));
        kv_uses++;
    }

    WR_DEV void store_wide(const Words4& stored, int pass) const {
        WR_UNROLL
        for (int half = 0; half < 2; half++) {
            Words4 wide;
            WR_UNROLL
            for (int i = 0; i < 2; i++)
                widen_in_order<T>(Stored{}, stored.w[2 * half + i], wide.w[2 * i],
                                  wide.w[2 * i + 1]);
            char* at = at_swizzled(to.kv.at(kv_uses), KEYS, own_row(), 2 * own_chunk() + half);
            at += pass * ROWS_AT_ONCE * ROW_BYTES;  // whole atoms
            store_shared(reinterpret_cast<Words4*>(at), wide);
        }
    }
};

template <class T, class Stored, int D>
WR_KERNEL(THREADS, 1) kernel(WR_PARAMS Params p) {
    prefill_wgmma::run<T, D, Widener<T, Stored, D>>(p);
}

}  // namespace wr::prefill_wgmma_quantized
