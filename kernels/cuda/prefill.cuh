// Prefill: many query tokens a request over its pages, causal from any offset.
//
// A work item is a run of query tokens of one request, at most ROWS / group; a CTA computes one
// item for one KV head. Rows of the products are (token, query head of the group), so that any
// group fills them; keys come in tiles of 64 from the request's first token on. A row's numbers
// thus do not depend on the item, the chunk or the batch that it is computed in: tiles beyond its
// own token add exact zeros, or are left out by the whole warp.
//
// FlashAttention-2's division of work (Dao 2023): each of four warps has 32 rows and all keys,
// nobody exchanges anything but the tiles. 32 rows and not 16, since every warp reads the whole
// tile from shared memory: that is 14 FLOP for each byte read with 16 rows, 26 with 32.
// One barrier a tile: the next tile's copy begins once all are done with the one before.
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

struct Item {  // int32[4]
    int32_t request;
    int32_t token, tokens;  // rows of q
    int32_t position;       // of the first one in its request
};

struct Params {
    const uint16_t* q;  // [token, head, D]
    int64_t q_token, q_head;
    Pages pages;
    const int32_t* page_table;  // [request, page of the request]
    int64_t table_row;
    const int32_t* item_count;
    const Item* items;
    float scale_log2;  // of scores, times log2(e)
    uint16_t* out;     // [token, head, D]
    int64_t out_token, out_head;
    float* lse;  // [token, head], base 2; may be null
    int64_t lse_token, lse_head;
    int32_t kv_heads, group;
};

template <int D>
constexpr int Q_BYTES = ROWS * D * 2;
template <int D>
constexpr int RING_BYTES = DEPTH * STAGE_BYTES<D>;
template <int D>
constexpr int SHARED_BYTES = Q_BYTES<D> + WARPS * RING_BYTES<D>;

// The running softmax of a warp. Lane 4g + t has of half m the rows g (h = 0) and g + 8 (h = 1).
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
    WR_DEV void take(float (&scores)[HALVES][COLUMNS][4], float scale_log2) {
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

// The rows of one warp: which tokens they see, and where their results go.
struct Rows {
    const Params& p;
    int position;  // of the item's first token
    int count;     // that are there; others compute along, with zeros for queries
    int end;       // tokens that the last one sees; none where no row is there

    WR_DEV Rows(const Params& params, const Item& item) : p(params), position(item.position) {
        count = item.tokens * p.group - static_cast<int>(warp()) * WARP_ROWS;
        end = count > 0 ? seen_by(WARP_ROWS - 1) : 0;
    }

    WR_DEV int seen_by(int row) const {
        return position + (static_cast<int>(warp()) * WARP_ROWS + row) / p.group + 1;
    }
};

// Scores of 8 * COLUMNS keys, in the tiles of rings from `stage` on.
template <class T, int D, int COLUMNS>
WR_DEV void score(char* queries, char* stage, float (&scores)[HALVES][COLUMNS][4]) {
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

template <class T, int D, int COLUMNS>
WR_DEV void mix(const float (&weights)[HALVES][COLUMNS][4], char* stage,
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

template <class T, int D>
WR_DEV void attend(const Rows& rows, char* queries, char* stage, int first_token, float scale_log2,
                   Softmax<D>& softmax) {
    float scores[HALVES][KEYS / 8][4] = {};
    score<T, D>(queries, stage, scores);
    if (first_token + KEYS > rows.position + 1) {
        int l = static_cast<int>(lane());
        WR_UNROLL
        for (int m = 0; m < HALVES; m++)
            WR_UNROLL
            for (int h = 0; h < 2; h++) {
                int seen = rows.seen_by(16 * m + 8 * h + l / 4) - first_token - l % 4 * 2;
                WR_UNROLL
                for (int n = 0; n < KEYS / 8; n++)
                    WR_UNROLL
                    for (int i = 0; i < 2; i++)
                        if (8 * n + i >= seen) scores[m][n][2 * h + i] = NEVER;
            }
    }
    softmax.take(scores, scale_log2);
    mix<T, D>(scores, stage, softmax.out);
}

// Copies the item's queries, rows (token, head), zeros beyond; part of the first tile's group.
template <int D>
WR_DEV void fetch_q(const Params& p, const Item& item, int kv_head, char* to) {
    constexpr int CHUNKS = D / 8;
    int chunk = static_cast<int>(thread()) % CHUNKS;
    for (int row = static_cast<int>(thread()) / CHUNKS; row < ROWS; row += THREADS / CHUNKS) {
        int token = row / p.group, head = kv_head * p.group + row % p.group;
        const uint16_t* from = p.q + (item.token + token) * p.q_token + head * p.q_head;
        copy_async(at_swizzled<D>(to, row, chunk), from + chunk * 8, token < item.tokens);
    }
}

// Normalizes and writes a warp's rows, by way of its queries' place, so that lanes next to each
// other write next to each other.
template <class T, int D>
WR_DEV void write(const Params& p, const Item& item, const Rows& rows, int kv_head, char* own,
                  Softmax<D>& softmax) {
    int l = static_cast<int>(lane()), first = static_cast<int>(warp()) * WARP_ROWS;
    sync_warp();
    WR_UNROLL
    for (int m = 0; m < HALVES; m++)
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int row = 16 * m + 8 * h + l / 4;
            float sum = softmax.sum[m][h];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
            float scale = 1 / sum;
            WR_UNROLL
            for (int n = 0; n < D / 8; n++) {
                const float* pair = &softmax.out[m][n][2 * h];
                char* to = at_swizzled<D>(own, row, n) + l % 4 * 4;
                store_shared(reinterpret_cast<uint32_t*>(to),
                             pack<T>(pair[0] * scale, pair[1] * scale));
            }
            if (p.lse != nullptr && l % 4 == 0 && row < rows.count) {
                int64_t token = item.token + (first + row) / p.group;
                int64_t head = kv_head * p.group + (first + row) % p.group;
                store(p.lse + token * p.lse_token + head * p.lse_head,
                      softmax.largest[m][h] * p.scale_log2 + log2_fast(sum));
            }
        }
    sync_warp();
    constexpr int CHUNKS = D / 8;
    for (int row = l / CHUNKS; row < WARP_ROWS && row < rows.count; row += 32 / CHUNKS) {
        int64_t token = item.token + (first + row) / p.group;
        int64_t head = kv_head * p.group + (first + row) % p.group;
        const char* from = at_swizzled<D>(own, row, l % CHUNKS);
        uint16_t* to = p.out + token * p.out_token + head * p.out_head + l % CHUNKS * 8;
        store(reinterpret_cast<Words4*>(to), load_shared(reinterpret_cast<const Words4*>(from)));
    }
}

template <class T, int D>
WR_KERNEL(THREADS, 2) kernel(WR_PARAMS Params p) {
    // KV heads of an item lie side by side, so that the longest items begin first for all of them.
    int number = static_cast<int>(cta_x()) / p.kv_heads;
    int kv_head = static_cast<int>(cta_x()) % p.kv_heads;
    if (number >= load(p.item_count)) return;
    Words4 words = load(reinterpret_cast<const Words4*>(p.items + number));
    Item item{static_cast<int32_t>(words.w[0]), static_cast<int32_t>(words.w[1]),
              static_cast<int32_t>(words.w[2]), static_cast<int32_t>(words.w[3])};
    char* queries = shared() + static_cast<int>(warp()) * WARP_ROWS * D * 2;
    Rows rows(p, item);
    int first = static_cast<int>(warp()) * TILE, end = item.position + item.tokens;
    char* rings = shared() + Q_BYTES<D>;
    Ring<D, WARPS, DEPTH> ring{p.pages,
                               p.page_table + item.request * p.table_row,
                               kv_head * p.pages.kv_head,
                               rings + static_cast<int>(warp()) * RING_BYTES<D>,
                               first,
                               end,
                               (end + KEYS - 1) / KEYS};
    fetch_q<D>(p, item, kv_head, shared());
    ring.fetch(0);
    Softmax<D> softmax;
    for (int step = 0; step < ring.count; step++) {
        wait_async<0>();
        sync_cta();  // these tiles are there for all, and all are done with the ones before
        ring.fetch(step + 1);
        if (step * KEYS >= rows.end) continue;
        char* stage = rings + step % DEPTH * STAGE_BYTES<D>;
        attend<T, D>(rows, queries, stage, step * KEYS, p.scale_log2, softmax);
    }
    wait_async<0>();
    if (rows.count > 0) write<T, D>(p, item, rows, kv_head, queries, softmax);
}

}  // namespace wr::prefill
