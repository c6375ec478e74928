// Decode over quantized pages: `decode.cuh` with tiles of bytes, made operands in registers.
//
// A key's scale goes into its score, a value's into its weight, so that no element is multiplied.
// Dimensions of the first product and rows of the second are in an order that suits the bytes: lane
// t of four has 16 neighbouring dimensions of a key, and rows g and g + 8 of an output tile are the
// dimensions 2g and 2g + 1.
#pragma once

#include "byte_ring.cuh"
#include "decode.cuh"
#include "widen.cuh"

namespace wr::decode_quantized {

using namespace decode;

struct ByteParams {
    Params own;  // but for its pages
    BytePages pages;
};

// Host side: checked arguments, `stored` an 8-bit Dtype of `abi.h`.
void run(bool is_bf16, int32_t stored, int64_t head_dim, int64_t items,
         const ByteParams& params, void* stream);

template <int D>
constexpr int SHARED_BYTES_HERE = WARPS * BYTE_STAGES<D> * BYTE_STAGE_BYTES<D>;

// Q as the right-hand operand: step 4i + j has of lane t the dimensions 64i + 16t + 4j and on.
template <int D, int COLUMNS>
WR_DEV void load_parted_q(const Params& p, const Item& item, int kv_head,
                          uint32_t (&q)[COLUMNS][D / 16][2]) {
    int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    WR_UNROLL
    for (int n = 0; n < COLUMNS; n++) {
        int head = n * 8 + g;
        const uint16_t* row = p.q + item.request * p.q_request +
                              static_cast<int64_t>(kv_head * p.group + head) * p.q_head + 16 * t;
        WR_UNROLL
        for (int k = 0; k < D / 16; k++) {
            auto at = reinterpret_cast<const Words2*>(row + 64 * (k / 4) + 4 * (k % 4));
            Words2 words = head < p.group ? load(at) : Words2{};
            part(words.w[0], words.w[1], q[n][k][0], q[n][k][1]);
        }
    }
}

template <class T, class Stored, int D, int COLUMNS>
WR_DEV void attend(char* tile, int left, float scale_log2,
                             const uint32_t (&q)[COLUMNS][D / 16][2],
                             Softmax<D, COLUMNS>& softmax) {
    int l = static_cast<int>(lane()), g = l / 4, t = l % 4;
    float scores[COLUMNS][4] = {};
    WR_UNROLL
    for (int i = 0; i < D / 64; i++) {
        Words4 first = load_shared(reinterpret_cast<Words4*>(key_at<D>(tile, g, t + 4 * i)));
        Words4 second = load_shared(reinterpret_cast<Words4*>(key_at<D>(tile, g + 8, t + 4 * i)));
        WR_UNROLL
        for (int j = 0; j < 4; j++) {
            uint32_t keys[4];
            widen<T>(Stored{}, first.w[j], keys[0], keys[2]);
            widen<T>(Stored{}, second.w[j], keys[1], keys[3]);
            WR_UNROLL
            for (int n = 0; n < COLUMNS; n++) mma<T>(scores[n], keys, q[n][4 * i + j]);
        }
    }
    float key_scale[2], value_scale[2];
    WR_UNROLL
    for (int h = 0; h < 2; h++) {
        const float* scales = scales_at<D>(tile) + g + 8 * h;
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
        softmax.take(scores[n], n);
        WR_UNROLL
        for (int h = 0; h < 2; h++)
            weights[n][h] = transpose(pack<T>(scores[n][2 * h] * value_scale[h],
                                              scores[n][2 * h + 1] * value_scale[h]));
    }
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

template <class T, class Stored, int D, int COLUMNS>
WR_KERNEL(THREADS, 2) kernel(WR_PARAMS ByteParams all) {
    const Params& p = all.own;
    Words4 words = load(reinterpret_cast<const Words4*>(p.items + cta_x()));
    if (static_cast<int>(cta_x()) >= load(p.item_count)) return;
    Item item{static_cast<int32_t>(words.w[0]), static_cast<int32_t>(words.w[1]),
              static_cast<int32_t>(words.w[2]), static_cast<int32_t>(words.w[3])};
    int kv_head = static_cast<int>(cta_y()), w = static_cast<int>(warp());
    int tiles_there = (item.end - item.begin + TILE - 1) / TILE;
    constexpr int STAGES_HERE = BYTE_STAGES<D>;
    ByteRing<D, WARPS> tiles{all.pages,
                             p.page_table + item.request * p.table_row,
                             kv_head,
                             shared() + w * STAGES_HERE * BYTE_STAGE_BYTES<D>,
                             item.begin + w * TILE,
                             item.end,
                             (tiles_there - w + WARPS - 1) / WARPS};
    WR_UNROLL
    for (int tile = 0; tile < STAGES_HERE - 1; tile++) tiles.fetch(tile);
    uint32_t q[COLUMNS][D / 16][2];
    load_parted_q<D>(p, item, kv_head, q);
    Softmax<D, COLUMNS> softmax;
    for (int tile = 0; tile < tiles.count; tile++) {
        wait_async<STAGES_HERE - 2>();
        sync_warp();  // this tile is there for all lanes, and all are done with the one before
        tiles.fetch(tile + STAGES_HERE - 1);
        int left = item.end - tiles.token_of(tile);
        attend<T, Stored, D, COLUMNS>(tiles.stage(tile), left, p.scale_log2, q, softmax);
    }
    wait_async<0>();
    sync_cta();  // the rings are free for the results
    float* results = reinterpret_cast<float*>(shared());
    leave_for_others<D, COLUMNS, true>(results + w * 8 * COLUMNS * (MERGE_ROW<D> + 2), softmax);
    sync_cta();
    write_item<T, D, COLUMNS>(p, item, kv_head, results);
}

}  // namespace wr::decode_quantized
