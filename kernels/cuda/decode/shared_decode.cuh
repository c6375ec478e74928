// Shared decode: one query token a request, where requests with the same pages read them once.
//
// A work item is (requests next to each other in `members`, tokens [begin, end), slots): they name
// the same pages for those tokens. For one KV head, their query heads are the rows of the products:
//
//   up to 16 rows   `decode.cuh`: tokens and dimensions are the MMA's rows, query heads its
//                   columns, each warp takes every fourth tile. So also what a request has alone.
//   up to 128       as in prefill, without its mask: a warp has 32 rows, all warps see each tile.
//                   Warps without rows copy keys and compute nothing.
//
// The grid is as large as the GPU and walks over the list with its own width as stride: items are
// longest first, so that what one CTA gets exceeds another's part by at most one item. An item
// stores normalized float32 results and base-2 log-sum-exps for `merge.cuh`, in a slot for each of
// its requests; slot -1 is all of its one request and goes straight to the output.
#pragma once

#include "decode/decode.cuh"
#include "prefill/prefill_tiles.cuh"

namespace wr::shared_decode {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int FEW_ROWS = 16, MOST_ROWS = prefill::ROWS;
static_assert(WARPS == decode::WARPS && WARPS == prefill::WARPS);

struct Item {  // int32[8]
    int32_t first, requests;  // of `members`
    int32_t begin, end;       // tokens
    int32_t slot;             // of the first member, the others' follow
    int32_t pages;            // where in `page_table` those of the first member begin
    int32_t unused[2];
};

struct Params {
    const uint16_t* q;  // [request, head, D]
    int64_t q_row, q_head;
    const int32_t* page_table;
    const int32_t *item_count, *members;
    const Item* items;
    float scale_log2;  // of scores, times log2(e)
    uint16_t* out;     // [request, head, D]
    int64_t out_row, out_head;
    float *partial, *partial_lse;  // [slot, head, D] and [slot, head], dense
    int32_t heads, group;
    int32_t ctas;  // for each KV head
};

template <class Pages>
struct ParamsOver : Params {
    Pages pages;
};

// How pages of one kind are read: `Few` as `decode.cuh` does, `Many` as prefill does.
template <class Few, class Many>
constexpr int SHARED_BYTES = decode::SHARED_BYTES<Few> > prefill::SHARED_BYTES<Many>
                                 ? decode::SHARED_BYTES<Few>
                                 : prefill::SHARED_BYTES<Many>;

// What an item computes for one KV head: its rows are query heads, request after request.
struct Task {
    const Params& p;
    Item item;
    int kv_head, rows;

    WR_DEV Task(const Params& params, int number) : p(params) {
        auto from = reinterpret_cast<const Words4*>(p.items + number);
        Words4 words = load(from), more = load(from + 1);
        item = {static_cast<int32_t>(words.w[0]), static_cast<int32_t>(words.w[1]),
                static_cast<int32_t>(words.w[2]), static_cast<int32_t>(words.w[3]),
                static_cast<int32_t>(more.w[0]),  static_cast<int32_t>(more.w[1]),
                {}};
        kv_head = static_cast<int>(cta_y());
        rows = item.requests * p.group;
    }

    WR_DEV int64_t request_of(int row) const {
        return load(p.members + item.first + row / p.group);
    }
    WR_DEV int64_t head_of(int row) const { return kv_head * p.group + row % p.group; }

    // Row of Q, or null beyond the last one.
    WR_DEV const uint16_t* q(int row) const {
        if (row >= rows) return nullptr;
        return p.q + request_of(row) * p.q_row + head_of(row) * p.q_head;
    }
    WR_DEV const int32_t* table() const { return p.page_table + item.pages; }

    // Row of `partial` and of `partial_lse`.
    WR_DEV int64_t partial_of(int row) const {
        return (item.slot + row / p.group) * static_cast<int64_t>(p.heads) + head_of(row);
    }
    WR_DEV uint16_t* out_of(int row) const {
        return p.out + request_of(row) * p.out_row + head_of(row) * p.out_head;
    }
};

template <class Few, int COLUMNS>
WR_DEV void attend_few(const Task& task, const typename Few::Pages& pages) {
    using T = typename Few::T;
    constexpr int D = Few::D;
    const Params& p = task.p;
    const float* all = decode::attend<Few, COLUMNS>(
        pages, task.table(), task.kv_head, task.item.begin, task.item.end, p.scale_log2,
        [&](int row) { return task.q(row); });
    for (int at = static_cast<int>(thread()); at < task.rows * (D / 4); at += THREADS) {
        int row = at / (D / 4), quad = at % (D / 4);
        float out[4] = {}, lse = decode::combine<D, COLUMNS>(all, row, quad, out);
        if (task.item.slot < 0) {
            decode::store_out<T>(task.out_of(row) + 4 * quad, out);
        } else {
            decode::store_partial(p.partial + task.partial_of(row) * D + 4 * quad, out);
            if (quad == 0) store(p.partial_lse + task.partial_of(row), lse);
        }
    }
}

// Copies the queries of a warp's rows, zeros beyond the last one. Each lane looks up one row.
template <int D>
WR_DEV void fetch_q(const Task& task, char* to) {
    static_assert(prefill::WARP_ROWS == 32);
    constexpr int CHUNKS = D / 8;
    int l = static_cast<int>(lane()), chunk = l % CHUNKS;
    int first = static_cast<int>(warp()) * 32;
    const uint16_t* own = task.q(first + l);
    int64_t offset = own ? own - task.p.q : 0;
    WR_UNROLL
    for (int row = l / CHUNKS; row < 32; row += 32 / CHUNKS) {
        const uint16_t* from = task.p.q + shfl(offset, static_cast<unsigned>(row));
        copy_async(at_swizzled<D>(to, row, chunk), from + chunk * 8, first + row < task.rows);
    }
    commit_async();
}

// Masks tokens from `left` on: they are another item's, or nobody's.
template <int COLUMNS>
WR_DEV void mask_tail(float (&scores)[prefill::HALVES][COLUMNS][4], int left) {
    int t = static_cast<int>(lane()) % 4;
    WR_UNROLL
    for (int m = 0; m < prefill::HALVES; m++)
        WR_UNROLL
        for (int n = 0; n < COLUMNS; n++)
            WR_UNROLL
            for (int i = 0; i < 4; i++)
                if (8 * n + 2 * t + i % 2 >= left) scores[m][n][i] = prefill::NEVER;
}

// One warp's rows, normalized, to their slots: four lanes write 32 bytes that lie together.
template <int D>
WR_DEV void write_partial(const Task& task, prefill::Softmax<D>& softmax) {
    const Params& p = task.p;
    int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    WR_UNROLL
    for (int m = 0; m < prefill::HALVES; m++)
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            float& sum = softmax.sum[m][h];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
        }
    WR_UNROLL
    for (int m = 0; m < prefill::HALVES; m++)
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int row = static_cast<int>(warp()) * prefill::WARP_ROWS + 16 * m + 8 * h + g;
            if (row >= task.rows) continue;
            float sum = softmax.sum[m][h], scale = 1 / sum;
            int64_t partial = task.partial_of(row);
            WR_UNROLL
            for (int n = 0; n < D / 8; n++) {
                const float* pair = &softmax.out[m][n][2 * h];
                Words2 words{{bits_of(pair[0] * scale), bits_of(pair[1] * scale)}};
                store(reinterpret_cast<Words2*>(p.partial + partial * D + 8 * n + 2 * t), words);
            }
            if (t == 0)
                store(p.partial_lse + partial,
                      softmax.largest[m][h] * p.scale_log2 + log2_fast(sum));
        }
}

template <class T, class Many>
WR_DEV void attend_many(const Params& p, const typename Many::Pages& pages, int number) {
    using prefill::HALVES, prefill::KEYS, prefill::RING_BYTES, prefill::WARP_ROWS;
    constexpr int D = Many::D, KEYS_AT_ONCE = Many::AT_ONCE_IN_WALK;
    Task task(p, number);
    int w = static_cast<int>(warp());
    char* queries = shared() + w * WARP_ROWS * D * 2;
    Many keys(pages, task.table(), task.kv_head, task.item.begin, task.item.end,
              shared() + prefill::Q_BYTES<D>);
    bool is_idle = w * WARP_ROWS >= task.rows;
    keys.fetch(0);  // first: they come from farther away
    if (!is_idle) fetch_q<D>(task, queries);
    prefill::Softmax<D> softmax;
    for (int step = 0; step < keys.steps(); step++) {
        wait_async<0>();
        keys.finish(step);
        sync_cta();  // these tiles are there for all, and all are done with the ones before
        keys.fetch(step + 1);
        if (is_idle) continue;
        int left = keys.left(step);
        for (int key = 0; key < KEYS; key += KEYS_AT_ONCE) {
            float scores[HALVES][KEYS_AT_ONCE / 8][4] = {};
            char* tiles = keys.stage(step) + key / TILE * RING_BYTES<D>;
            prefill::multiply_qk<T, D>(queries, tiles, scores);
            keys.scale_scores(scores, step, key / TILE);
            if (left - key < KEYS_AT_ONCE) mask_tail(scores, left - key);
            softmax.update(scores, p.scale_log2);
            keys.scale_weights(scores, step, key / TILE);
            prefill::multiply_pv<T, D>(scores, tiles, softmax.out);
        }
    }
    wait_async<0>();
    // The item is read anew, since registers are taken until here.
    if (!is_idle) write_partial<D>(Task(p, number), softmax);
}

template <class Few, class Many>
WR_DEV void run(const ParamsOver<typename Few::Pages>& p) {
    launch_dependent_grids();  // `merge`, which finds room once CTAs end
    int count = load(p.item_count);
    for (int number = static_cast<int>(cta_x()); number < count; number += p.ctas) {
        Task task(p, number);
        if (task.rows <= 8)
            attend_few<Few, 1>(task, p.pages);
        else if (task.rows <= FEW_ROWS)
            attend_few<Few, 2>(task, p.pages);
        else
            attend_many<typename Few::T, Many>(p, p.pages, number);
        sync_cta();  // all are done with shared memory
    }
}

template <class T, int D>
WR_KERNEL(THREADS, 2) kernel(WR_PARAMS ParamsOver<Pages> p) {
    run<decode::WideTiles<T, D>, prefill::WideKeys<D>>(p);
}

}  // namespace wr::shared_decode
