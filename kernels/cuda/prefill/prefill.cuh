// Prefill: many query tokens a request over its pages, causal from any offset.
//
// A work item is a run of query tokens of one request, at most ROWS / group; a CTA computes one
// item for one KV head. Rows of the products are (token, query head of the group), so that any
// group fills them; keys come in tiles of 64 from the request's first token on. A row's numbers
// thus do not depend on the item, the chunk or the batch that it is computed in: tiles beyond its
// own token add exact zeros, or are left out by the whole warp.
//
// Where a request's chunk has few items, each is cut by its keys, too: pieces begin with a page at
// multiples of 128 keys that the item's first token sees, so that every row sees a key of every
// piece: a kernel takes a piece's keys as if they were a request's first ones. A piece stores a
// normalized float32 result and its base-2 log-sum-exp for each row, which `merge.cuh` adds.
//
// The mainloop's products are in `prefill_tiles.cuh`. One barrier for 64 keys: the next ones' copy
// begins once all are done with the ones before.
#pragma once

#include "prefill/prefill_tiles.cuh"

namespace wr::prefill {

struct Item {  // int32[8]
    int32_t request;
    int32_t token, tokens;  // rows of q
    int32_t position;       // of the first one in its request
    int32_t begin, end;     // keys, from the beginning of a page on
    int32_t slot;           // of the first row's partial result, others follow; -1: all of its keys
    int32_t unused;
};

WR_DEV Item load_item(const Item* at) {
    Words4 rows = load(reinterpret_cast<const Words4*>(at));
    Words4 keys = load(reinterpret_cast<const Words4*>(at) + 1);
    auto word = [](uint32_t bits) { return static_cast<int32_t>(bits); };
    return {word(rows.w[0]), word(rows.w[1]), word(rows.w[2]), word(rows.w[3]),
            word(keys.w[0]), word(keys.w[1]), word(keys.w[2]), 0};
}

struct Params {
    const uint16_t* q;  // [token, head, D]
    int64_t q_row, q_head;
    const int32_t* page_table;  // [request, page of the request]
    int64_t table_row;
    const int32_t* item_count;
    const Item* items;
    float scale_log2;  // of scores, times log2(e)
    uint16_t* out;     // [token, head, D]
    int64_t out_row, out_head;
    float* lse;  // [token, head], base 2; may be null
    int64_t lse_token, lse_head;
    float *partial, *partial_lse;  // [slot, head, D] and base 2 [slot, head], dense
    int32_t kv_heads, group;
    bool is_cut;  // whether there are slots: chosen on the host
};
template <class Pages>
struct ParamsOver : Params {
    Pages pages;
};

// The rows of one warp: which of the item's keys they see, counted from its first one.
template <bool IS_CUT>
struct Rows {
    const Params& p;
    int position;  // of the item's first token, from its first key on
    int count;     // that are there; others compute along, with zeros for queries
    int end;       // keys that the last one sees; none where no row is there

    WR_DEV Rows(const Params& params, const Item& item)
        : p(params), position(item.position - (IS_CUT ? item.begin : 0)) {
        count = item.tokens * p.group - static_cast<int>(warp()) * WARP_ROWS;
        end = count > 0 ? seen_by(WARP_ROWS - 1) : 0;
    }

    WR_DEV int seen_by(int row) const {
        return position + (static_cast<int>(warp()) * WARP_ROWS + row) / p.group + 1;
    }
};

template <int COLUMNS, class Rows>
WR_DEV void mask_causal(const Rows& rows, int first_token, float (&scores)[HALVES][COLUMNS][4]) {
    int l = static_cast<int>(lane());
    WR_UNROLL
    for (int m = 0; m < HALVES; m++)
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int seen = rows.seen_by(16 * m + 8 * h + l / 4) - first_token - l % 4 * 2;
            WR_UNROLL
            for (int n = 0; n < COLUMNS; n++)
                WR_UNROLL
                for (int i = 0; i < 2; i++)
                    if (8 * n + i >= seen) scores[m][n][2 * h + i] = NEVER;
        }
}

// AT_ONCE: keys whose scores are in registers together.
template <class T, int AT_ONCE, class Rows, class Keys>
WR_DEV void attend(const Rows& rows, char* queries, const Keys& keys, int step, float scale_log2,
                   Softmax<Keys::D>& softmax) {
    constexpr int D = Keys::D, COLUMNS = AT_ONCE / 8;
    for (int key = 0; key < KEYS; key += AT_ONCE) {
        char* tiles = keys.stage(step) + key / TILE * RING_BYTES<D>;
        float scores[HALVES][COLUMNS][4] = {};
        multiply_qk<T, D>(queries, tiles, scores);
        keys.scale_scores(scores, step, key / TILE);
        if (step * KEYS + key + AT_ONCE > rows.position + 1)
            mask_causal(rows, step * KEYS + key, scores);
        softmax.update(scores, scale_log2);
        keys.scale_weights(scores, step, key / TILE);
        multiply_pv<T, D>(scores, tiles, softmax.out);
    }
}

// Copies the item's queries, rows (token, head), zeros beyond; part of the first tile's group.
template <int D>
WR_DEV void fetch_q(const Params& p, const Item& item, int kv_head, char* to) {
    constexpr int CHUNKS = D / 8;
    int chunk = static_cast<int>(thread()) % CHUNKS;
    for (int row = static_cast<int>(thread()) / CHUNKS; row < ROWS; row += THREADS / CHUNKS) {
        int token = row / p.group, head = kv_head * p.group + row % p.group;
        const uint16_t* from = p.q + (item.token + token) * p.q_row + head * p.q_head;
        copy_async(at_swizzled<D>(to, row, chunk), from + chunk * 8, token < item.tokens);
    }
}

// The epilogue of whole keys: normalizes and writes a warp's rows, by way of the shared memory of
// its queries, so that stores are coalesced.
template <class T, int D, class Rows>
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
        uint16_t* to = p.out + token * p.out_row + head * p.out_head + l % CHUNKS * 8;
        store(reinterpret_cast<Words4*>(to), load_shared(reinterpret_cast<const Words4*>(from)));
    }
}

// The epilogue of a piece of the keys: a warp's partial results, normalized.
template <int D, class Rows>
WR_DEV void write_partial(const Params& p, const Item& item, const Rows& rows, int kv_head,
                          const Softmax<D>& softmax) {
    int l = static_cast<int>(lane()), first = static_cast<int>(warp()) * WARP_ROWS;
    int64_t slot = item.slot, heads = int64_t{1} * p.kv_heads * p.group;
    WR_UNROLL
    for (int m = 0; m < HALVES; m++)
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int row = 16 * m + 8 * h + l / 4;
            float sum = softmax.sum[m][h];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
            if (row >= rows.count) continue;
            int64_t token = slot + (first + row) / p.group;
            int64_t partial_row = token * heads + kv_head * p.group + (first + row) % p.group;
            float scale = 1 / sum;
            float* to = p.partial + partial_row * D + l % 4 * 2;
            WR_UNROLL
            for (int n = 0; n < D / 8; n++) {
                const float* pair = &softmax.out[m][n][2 * h];
                Words2 words{bits_of(pair[0] * scale), bits_of(pair[1] * scale)};
                store(reinterpret_cast<Words2*>(to + 8 * n), words);
            }
            if (l % 4 == 0)
                store(p.partial_lse + partial_row,
                      softmax.largest[m][h] * p.scale_log2 + log2_fast(sum));
        }
}

// IS_CUT: items may be pieces, which takes registers that scores have otherwise.
template <class T, class Keys, bool IS_CUT>
WR_DEV void run(const ParamsOver<typename Keys::Pages>& p) {
    constexpr int D = Keys::D, AT_ONCE = IS_CUT ? Keys::AT_ONCE_IN_WALK : Keys::AT_ONCE;
    if constexpr (IS_CUT) launch_dependent_grids();  // `merge`
    // KV heads of an item lie side by side, so that the longest items begin first for all of them.
    int number = static_cast<int>(cta_x()) / p.kv_heads;
    int kv_head = static_cast<int>(cta_x()) % p.kv_heads;
    if (number >= load(p.item_count)) return;
    Item item = load_item(p.items + number);
    char* queries = shared() + static_cast<int>(warp()) * WARP_ROWS * D * 2;
    Rows<IS_CUT> rows(p, item);
    const int32_t* table = p.page_table + item.request * p.table_row;
    int end = item.position + item.tokens;
    if constexpr (IS_CUT) {
        table += item.begin / (p.pages.tiles_per_page * TILE);
        end = item.end - item.begin;
    }
    Keys keys(p.pages, table, kv_head, 0, end, shared() + Q_BYTES<D>);
    fetch_q<D>(p, item, kv_head, shared());
    keys.fetch(0);
    Softmax<D> softmax;
    for (int step = 0; step < keys.steps(); step++) {
        wait_async<0>();
        keys.finish(step);
        sync_cta();  // these tiles are there for all, and all are done with the ones before
        keys.fetch(step + 1);
        if (step * KEYS >= rows.end) continue;
        attend<T, AT_ONCE>(rows, queries, keys, step, p.scale_log2, softmax);
    }
    wait_async<0>();
    if (rows.count <= 0) return;
    if constexpr (IS_CUT)
        if (item.slot >= 0) return write_partial<D>(p, item, rows, kv_head, softmax);
    write<T, D>(p, item, rows, kv_head, queries, softmax);
}

template <class T, int D, bool IS_CUT>
WR_KERNEL(THREADS, 2) kernel(WR_PARAMS ParamsOver<Pages> p) {
    run<T, WideKeys<D>, IS_CUT>(p);
}

}  // namespace wr::prefill
