// Prefill for Hopper: items, rows and results are those of `prefill.cuh`, products are `wgmma`s.
//
// FlashAttention-3's division of work (Shah et al. 2024): one warp brings queries, keys and values
// by boxes of 16 tokens, page by page, into places that it fills as they fall vacant; two
// warpgroups have 64 rows each and all keys, 128 at a time. Scores and output stay in registers,
// weights go from there into the second product. While a warpgroup weighs the scores of one block,
// its product of the weights before runs; and the warpgroups issue their products in turn, so that
// one's exponentials run beside the other's products.
//
// One CTA an SM walks over (item, KV head), longest first, with the grid's width as stride, every
// other round in reverse: so that nobody always gets the longest of its round. The filling warp
// walks ahead: the next item's queries and keys come while this one's last are used.
//
// Tokens beyond the item's last one may be anything, NaN also. As keys their scores are masked; as
// values they would be multiplied by zero, so they are zeros: whole tiles by boxes beyond the
// page, the last tile of a request by ordinary stores of the filling warp.
#pragma once

#include "prefill.cuh"
#include "wgmma.cuh"

namespace wr::prefill_wgmma {

using prefill::Item, prefill::NEVER, prefill::ROWS;

constexpr int CONSUMERS = 2, WARPGROUPS = 1 + CONSUMERS, THREADS = WARPGROUPS * WARPGROUP;
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32;
constexpr int OWN_ROWS = ROWS / CONSUMERS;  // of a warpgroup
constexpr int KEYS = 128;                   // tokens at once
constexpr int TILES = KEYS / TILE;
constexpr int Q_PLACES = 2, KV_PLACES = 4;        // K and V in turn
constexpr int FILLER_REGISTERS = 56, CONSUMER_REGISTERS = 224;  // of 168 each at the launch

struct Params {
    TensorMap q;     // (dim, head, token, 1), a box has the rows of an item
    TensorMap k, v;  // (dim, token of page, KV head, page), a box has TILE tokens
    prefill::ParamsOver<Pages> of;
    int32_t item_tokens, ctas;
};

template <int D>
constexpr int COLUMNS = D * 2 / ROW_BYTES;  // boxes side by side
template <int D>
constexpr int Q_BYTES = ROWS * D * 2;
template <int D>
constexpr int KV_BYTES = KEYS * D * 2;
constexpr int BARRIER_BYTES = 2 * (Q_PLACES + KV_PLACES + 1) * 8;
template <int D>
constexpr int SHARED_BYTES = Q_PLACES * Q_BYTES<D> + KV_PLACES * KV_BYTES<D> + BARRIER_BYTES;

// What all warps of a CTA share.
template <int D>
struct Shared {
    Places<Q_PLACES> q;
    Places<KV_PLACES> kv;
    PhaseBarrier* turn;  // [CONSUMERS]: whose products are next

    WR_DEV Shared() {
        char* places = shared() + Q_PLACES * Q_BYTES<D>;
        turn = reinterpret_cast<PhaseBarrier*>(places + KV_PLACES * KV_BYTES<D>);
        PhaseBarrier* q_barriers = turn + CONSUMERS;
        PhaseBarrier* kv_barriers = q_barriers + 2 * Q_PLACES;
        q = {shared(), Q_BYTES<D>, q_barriers, q_barriers + Q_PLACES};
        kv = {places, KV_BYTES<D>, kv_barriers, kv_barriers + KV_PLACES};
    }

    WR_DEV void init() const {
        q.init(1, CONSUMER_WARPS);
        kv.init(1, CONSUMER_WARPS);
        for (int n = 0; n < CONSUMERS; n++) init_phases(turn + n, WARPGROUP / 32);
    }
};

// The CTA's walk over (item, KV head), the same for all its warps.
struct Walk {
    const Params& p;
    int number, count;
    Item item{};
    int kv_head = 0, blocks = 0;
    int position = 0;  // of the item's first token, from its first key on

    WR_DEV explicit Walk(const Params& params) : p(params), number(static_cast<int>(cta_x())) {
        count = load(p.of.item_count) * p.of.kv_heads;
        look();
    }
    WR_DEV const Item* place() const { return p.of.items + number / p.of.kv_heads; }
    WR_DEV bool is_there() const { return number < count; }
    WR_DEV void next() {
        int own = static_cast<int>(cta_x()), round = number / p.ctas + 1;
        number = round * p.ctas + (round % 2 ? p.ctas - 1 - own : own);
        look();
    }
    WR_DEV void look() {
        if (!is_there()) return;
        kv_head = number % p.of.kv_heads;
        item = prefill::load_item(place());
        position = item.position - item.begin;
        blocks = (item.end - item.begin + KEYS - 1) / KEYS;
    }
};

// The filling warp. Lane l brings tile l of each block.
template <int D>
struct Filler {
    const Params& p;
    const Shared<D>& to;
    int q_uses = 0, kv_uses = 0;

    WR_DEV void run() {
        for (Walk walk(p); walk.is_there(); walk.next()) {
            fetch_q(walk);
            for (int block = 0; block < walk.blocks; block++)
                fetch_block(walk, walk.item.begin + block * KEYS);
        }
    }

    WR_DEV void fetch_q(const Walk& walk) {
        if (lane() == 0) {
            to.q.wait_vacant(q_uses);
            int rows = p.item_tokens * p.of.group;
            PhaseBarrier* filling = to.q.filling(q_uses);
            arrive_expecting(filling, rows * D * 2);
            for (int n = 0; n < COLUMNS<D>; n++)
                copy_box(p.q, to.q.at(q_uses) + n * ROWS * ROW_BYTES, filling, n * ROW_ELEMENTS,
                         walk.kv_head * p.of.group, walk.item.token, 0);
        }
        q_uses++;
        sync_warp();
    }

    WR_DEV void fetch_block(const Walk& walk, int first_token) {
        int page_tokens = p.of.pages.tiles_per_page * TILE;
        int token = first_token + static_cast<int>(lane()) * TILE;
        int page = 0, within = page_tokens;  // beyond the page: zeros
        if (lane() < TILES && token < walk.item.end) {
            const int32_t* pages = p.of.page_table + walk.item.request * p.of.table_row;
            page = load(pages + token / page_tokens);
            within = token % page_tokens;
        }
        to.kv.wait_vacant(kv_uses);
        if (lane() == 0) arrive_expecting(to.kv.filling(kv_uses), KV_BYTES<D>);
        fetch_tile(p.k, walk.kv_head, page, within, lane() < TILES);
        kv_uses++;
        to.kv.wait_vacant(kv_uses);
        int left = walk.item.end - first_token, last = left / TILE;
        bool is_cut = left < KEYS && left % TILE != 0;  // the last tile, by its end
        if (is_cut) copy_cut_tile(walk, last, page, within, left % TILE);
        int bytes = KV_BYTES<D> - (is_cut ? TILE * D * 2 : 0);
        if (lane() == 0) arrive_expecting(to.kv.filling(kv_uses), bytes);
        bool is_whole = !is_cut || static_cast<int>(lane()) != last;
        fetch_tile(p.v, walk.kv_head, page, within, lane() < TILES && is_whole);
        kv_uses++;
    }

    WR_DEV void fetch_tile(const TensorMap& map, int kv_head, int page, int within, bool is_mine) {
        if (is_mine) {
            char* tile = to.kv.at(kv_uses) + static_cast<int>(lane()) * TILE * ROW_BYTES;
            for (int n = 0; n < COLUMNS<D>; n++)
                copy_box(map, tile + n * KEYS * ROW_BYTES, to.kv.filling(kv_uses),
                         n * ROW_ELEMENTS, within, kv_head, page);
        }
        sync_warp();
    }

    // The values of tile `number`, of which `left` tokens are the request's: zeros after them.
    WR_DEV void copy_cut_tile(const Walk& walk, int number, int page, int within, int left) {
        unsigned from_lane = static_cast<unsigned>(number);
        page = static_cast<int>(shfl(static_cast<uint32_t>(page), from_lane));
        within = static_cast<int>(shfl(static_cast<uint32_t>(within), from_lane));
        const Pages& pages = p.of.pages;
        const uint16_t* values = pages.v + page * pages.page + within * pages.token +
                                 walk.kv_head * pages.kv_head;
        constexpr int CHUNKS = D / 8;
        int chunk = static_cast<int>(lane()) % CHUNKS;
        for (int row = static_cast<int>(lane()) / CHUNKS; row < TILE; row += 32 / CHUNKS) {
            Words4 words{};
            const uint16_t* from = values + row * pages.token + chunk * 8;
            if (row < left) words = load(reinterpret_cast<const Words4*>(from));
            char* at = at_boxed(to.kv.at(kv_uses), KEYS, number * TILE + row, chunk);
            store_shared(reinterpret_cast<Words4*>(at), words);
        }
        fence_async();
        sync_warp();
    }
};

}  // namespace wr::prefill_wgmma
