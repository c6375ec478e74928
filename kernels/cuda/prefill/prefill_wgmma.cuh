// Prefill for Hopper: items, rows and results are those of `prefill.cuh`, products are `wgmma`s.
//
// FlashAttention-3's division of work (Shah et al. 2024): one warpgroup, the producer, brings
// queries, keys and values into stages as they fall empty; two consumers have 64 rows each and all
// keys, 128 at a time. Keys and values come by boxes of as many tokens as divide a page and 128 (16
// for pages of 16, 64 for pages of 64), dealt to the lanes of all four producer warps. Scores and
// output stay in registers, weights (softmax's probabilities) go from there into PV. While a
// consumer computes the softmax of one block, the PV product of the block before runs; and order
// barriers let the consumers issue their products one after the other (ping-pong scheduling), so
// that one's exponentials run beside the other's products.
//
// One CTA an SM walks over (item, KV head), longest first, with the grid's width as stride, every
// other round in reverse: so that nobody always gets the longest of its round. The producer
// warps walk ahead: the next item's queries and keys come while this one's last are used.
//
// Tokens beyond the item's last one may be anything, NaN also. As keys their scores are masked; as
// values they would be multiplied by zero, so they are zeros: whole tiles by boxes beyond the
// page, the tile that an item's keys end in by ordinary stores. A block with such values comes by
// boxes of 16 tokens, whatever its page.
#pragma once

#include <type_traits>

#include "byte_ring.cuh"
#include "prefill/prefill.cuh"
#include "wgmma.cuh"

namespace wr::prefill_wgmma {

using prefill::Item, prefill::NEVER, prefill::ROWS;

constexpr int CONSUMERS = 2, WARPGROUPS = 1 + CONSUMERS, THREADS = WARPGROUPS * WARPGROUP;
constexpr int PRODUCER_WARPS = WARPGROUP / 32, CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32;
constexpr int OWN_ROWS = ROWS / CONSUMERS;  // of a warpgroup
constexpr int KEYS = 128;                   // tokens at once
constexpr int Q_STAGES = 2, KV_STAGES = 4;  // K and V in turn

template <class Pages>
struct ParamsOver {
    static constexpr bool HAS_SCALES = std::is_same_v<Pages, BytePages>;
    TensorMap q;  // (dim, head, token, 1), a box has the rows of an item
    prefill::ParamsOver<Pages> of;
    int32_t item_tokens, ctas;
};
struct Params : ParamsOver<Pages> {
    TensorMap k, v;     // (dim, token of page, KV head, page), a box has `box_tokens`
    TensorMap v_tiles;  // as v, a box has TILE tokens
    int32_t box_tokens;
};

template <int D>
constexpr int COLUMNS = D * 2 / ROW_BYTES;  // boxes side by side
template <int D>
constexpr int Q_BYTES = ROWS * D * 2;
template <int D>
constexpr int KV_BYTES = KEYS * D * 2;
constexpr int BARRIER_BYTES = 2 * (Q_STAGES + KV_STAGES + 1) * 8;
template <int D>
constexpr int SHARED_BYTES = Q_STAGES * Q_BYTES<D> + KV_STAGES * KV_BYTES<D> + BARRIER_BYTES;

// What all warps of a CTA share.
template <int D>
struct Shared {
    Pipeline<Q_STAGES> q;
    Pipeline<KV_STAGES> kv;
    Mbarrier* order;  // [CONSUMERS]: whose products are next
    float* all_scales;   // [KV_STAGES][KEYS] after the rest, where pages are quantized

    WR_DEV Shared() {
        char* stages = shared() + Q_STAGES * Q_BYTES<D>;
        order = reinterpret_cast<Mbarrier*>(stages + KV_STAGES * KV_BYTES<D>);
        Mbarrier* q_barriers = order + CONSUMERS;
        Mbarrier* kv_barriers = q_barriers + 2 * Q_STAGES;
        q = {shared(), Q_BYTES<D>, q_barriers, q_barriers + Q_STAGES};
        kv = {stages, KV_BYTES<D>, kv_barriers, kv_barriers + KV_STAGES};
        all_scales = reinterpret_cast<float*>(kv_barriers + 2 * KV_STAGES);
    }

    WR_DEV float* scales(int kv_use) const { return all_scales + kv_use % KV_STAGES * KEYS; }

    WR_DEV void init() const {
        q.init(1, CONSUMER_WARPS);
        kv.init(PRODUCER_WARPS, CONSUMER_WARPS);
        for (int n = 0; n < CONSUMERS; n++) init_mbarrier(order + n, WARPGROUP / 32);
    }
};

// The CTA's walk over (item, KV head), the same for all its warps.
struct Walk {
    const prefill::Params& of;
    int ctas, number;
    Item item{};
    int kv_head = 0, blocks = 0;
    int position = 0;  // of the item's first token, from its first key on

    template <class Params>
    WR_DEV explicit Walk(const Params& p)
        : of(p.of), ctas(p.ctas), number(static_cast<int>(cta_x())) {
        look();
    }
    WR_DEV const Item* entry() const { return of.items + number / of.kv_heads; }
    // Read again for each item, as are its parts: registers are few.
    WR_DEV bool is_there() const { return number < load(of.item_count) * of.kv_heads; }
    WR_DEV int round() const { return number / ctas; }
    WR_DEV void next() {
        int own = static_cast<int>(cta_x()), round = this->round() + 1;
        number = round * ctas + (round % 2 ? ctas - 1 - own : own);
        look();
    }
    WR_DEV void look() {
        if (!is_there()) return;
        kv_head = number % of.kv_heads;
        item = prefill::load_item(entry());
        position = item.position - item.begin;
        blocks = (item.end - item.begin + KEYS - 1) / KEYS;
    }
};

// The rows of an item's queries: one warp's part.
template <int D, class Params>
WR_DEV void fetch_q(const Params& p, const Shared<D>& to, const Walk& walk) {
    int use = walk.round();
    if (lane() == 0) {
        to.q.wait_empty(use);
        int rows = p.item_tokens * p.of.group;
        Mbarrier* barrier = to.q.full_barrier(use);
        arrive_expecting(barrier, rows * D * 2);
        for (int n = 0; n < COLUMNS<D>; n++)
            copy_box(p.q, to.q.at(use) + n * ROWS * ROW_BYTES, barrier, n * ROW_ELEMENTS,
                     walk.kv_head * p.of.group, walk.item.token, 0);
    }
    sync_warp();
}

// One of the producer warps. All of them fill every stage of K and V together.
template <int D>
struct Producer {
    static constexpr int REGISTERS = 56, CONSUMER_REGISTERS = 224;  // of 168 each at the launch

    const Params& p;
    const Shared<D>& to;
    int kv_uses = 0;

    static WR_DEV void prefetch_maps(const Params& p) {
        prefetch_map(p.q);
        prefetch_map(p.k);
        prefetch_map(p.v);
    }

    WR_DEV void run() {
        for (Walk walk(p); walk.is_there(); walk.next()) {
            if (warp() == 0) fetch_q<D>(p, to, walk);
            for (int block = 0; block < walk.blocks; block++)
                fetch_block(walk, walk.item.begin + block * KEYS);
        }
    }

    WR_DEV void fetch_block(const Walk& walk, int first_token) {
        Spot spot = find_own(walk, first_token, p.box_tokens);
        to.kv.wait_empty(kv_uses);
        announce(KV_BYTES<D>);
        fetch(p.k, walk.kv_head, spot, p.box_tokens, -1);
        int left = walk.item.end - first_token, box_tokens = p.box_tokens, cut = -1;
        if (left < KEYS) {  // values end within the block: by tiles
            box_tokens = TILE;
            spot = find_own(walk, first_token, TILE);
            if (left % TILE != 0) cut = left / TILE;
        }
        to.kv.wait_empty(kv_uses);
        if (cut >= 0) copy_cut_tile(walk, first_token, cut, left % TILE);
        announce(KV_BYTES<D> - (cut >= 0 ? TILE * D * 2 : 0));
        fetch(left < KEYS ? p.v_tiles : p.v, walk.kv_head, spot, box_tokens, cut);
    }

    // Every warp arrives, the first one for all of them with the bytes of all boxes.
    WR_DEV void announce(int bytes) const {
        if (lane() > 0) return;
        Mbarrier* barrier = to.kv.full_barrier(kv_uses);
        if (warp() == 0)
            arrive_expecting(barrier, bytes);
        else
            arrive(barrier);
    }

    // The box of this lane: each has one at most, neighbours are in different warps.
    WR_DEV int own_box() const {
        return static_cast<int>(lane()) * PRODUCER_WARPS + static_cast<int>(warp());
    }

    struct Spot {
        int page, within;
    };
    WR_DEV Spot find(const Walk& walk, int token) const {
        int page_tokens = p.of.pages.tiles_per_page * TILE;
        if (token >= walk.item.end) return {0, page_tokens};  // beyond the page: zeros
        const int32_t* pages = p.of.page_table + walk.item.request * p.of.table_row;
        return {load(pages + token / page_tokens), token % page_tokens};
    }
    WR_DEV Spot find_own(const Walk& walk, int first_token, int box_tokens) const {
        int first_row = own_box() / COLUMNS<D> * box_tokens;
        return find(walk, first_row < KEYS ? first_token + first_row : walk.item.end);
    }

    // Boxes of `box_tokens` tokens for the next stage, but those of tile `cut`.
    WR_DEV void fetch(const TensorMap& map, int kv_head, Spot spot, int box_tokens, int cut) {
        int number = own_box() / COLUMNS<D>, column = own_box() % COLUMNS<D>;
        int first_row = number * box_tokens;
        if (first_row < KEYS && number != cut)
            copy_box(map, to.kv.at(kv_uses) + (column * KEYS + first_row) * ROW_BYTES,
                     to.kv.full_barrier(kv_uses), column * ROW_ELEMENTS, spot.within, kv_head,
                     spot.page);
        kv_uses++;
        sync_warp();
    }

    // The values of tile `number`, of which `left` tokens are the item's: zeros after them.
    WR_DEV void copy_cut_tile(const Walk& walk, int first_token, int number, int left) const {
        Spot spot = find(walk, first_token + number * TILE);
        const Pages& pages = p.of.pages;
        const uint16_t* values = pages.v + spot.page * pages.page + spot.within * pages.token +
                                 walk.kv_head * pages.kv_head;
        constexpr int CHUNKS = D / 8;
        int own = static_cast<int>(thread()), chunk = own % CHUNKS;
        for (int row = own / CHUNKS; row < TILE; row += WARPGROUP / CHUNKS) {
            Words4 words{};
            const uint16_t* from = values + row * pages.token + chunk * 8;
            if (row < left) words = load(reinterpret_cast<const Words4*>(from));
            char* at = at_swizzled(to.kv.at(kv_uses), KEYS, number * TILE + row, chunk);
            store_shared(reinterpret_cast<Words4*>(at), words);
        }
        fence_async();
        sync_warp();
    }
};

}  // namespace wr::prefill_wgmma
