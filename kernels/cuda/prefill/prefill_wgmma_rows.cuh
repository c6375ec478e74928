// The consuming side of `prefill_wgmma.cuh`: a warpgroup's 64 rows of one item.
#pragma once

#include "prefill/prefill_wgmma.cuh"

namespace wr::prefill_wgmma {

// The running softmax of a warpgroup. A lane has two rows, h = 0 and 1.
template <class T, int D>
struct Softmax {
    float out[D / 2] = {};
    uint32_t weights[KEYS / 16][4];  // of the block before, as left operands
    float largest[2] = {NEVER, NEVER}, sum[2] = {}, kept[2];

    // `scores` become weights, `kept` is what older sums are to be multiplied by. Every row sees a
    // token of the first keys, so that its largest score is one of a token that it sees.
    WR_DEV void update(float (&scores)[KEYS / 2], float scale_log2) {
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            float now = largest[h];
            WR_UNROLL
            for (int n = 0; n < KEYS / 8; n++)
                now = larger(now, larger(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
            now = larger(now, shfl_xor(now, 1));
            now = larger(now, shfl_xor(now, 2));
            kept[h] = exp2_fast((largest[h] - now) * scale_log2);
            largest[h] = now;
            float shift = now * scale_log2, added = 0;
            WR_UNROLL
            for (int n = 0; n < KEYS / 8; n++)
                WR_UNROLL
                for (int i = 4 * n + 2 * h; i < 4 * n + 2 * h + 2; i++) {
                    scores[i] = exp2_fast(scores[i] * scale_log2 - shift);
                    added += scores[i];
                }
            sum[h] = sum[h] * kept[h] + added;
        }
    }

    WR_DEV void rescale() {
        WR_UNROLL
        for (int n = 0; n < D / 8; n++)
            WR_UNROLL
            for (int i = 0; i < 4; i++) out[4 * n + i] *= kept[i / 2];
    }

    // Rounds `scores`, which are weights by now, into operands.
    WR_DEV void round(const float (&scores)[KEYS / 2]) {
        WR_UNROLL
        for (int k = 0; k < KEYS / 16; k++)
            WR_UNROLL
            for (int i = 0; i < 4; i++)
                weights[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }
};

// One warpgroup's part of an item.
template <class T, int D, class Params>
struct Consumer {
    const Params& p;
    const Shared<D>& from;
    int number;  // of the warpgroup among the consumers
    int q_uses = 0, kv_uses = 0, order_uses = 0;

    WR_DEV void run() {
        if (number == 1) pass_order();  // the first one begins
        for (Walk walk(p); walk.is_there(); walk.next()) {
            Softmax<T, D> softmax;
            from.q.wait_full(q_uses);
            attend(walk, softmax);
            // Again: registers are few in `attend`.
            int slot = prefill::load_item(walk.entry()).slot;
            if (slot < 0)
                write(walk, softmax);
            else
                write_partial(walk, slot, softmax);
            fence_async();  // rows of results, where queries come next
            from.q.release(q_uses++);
        }
    }

    // Row h of this lane, of the item's ROWS.
    WR_DEV int row_of(int h) const {
        int own_warp = static_cast<int>(warp()) % (WARPGROUP / 32);
        return number * OWN_ROWS + own_warp * 16 + h * 8 + static_cast<int>(lane()) / 4;
    }

    WR_DEV void attend(const Walk& walk, Softmax<T, D>& softmax) {
        float scores[KEYS / 2];
        from.kv.wait_full(kv_uses);
        begin_products(scores);
        multiply_qk(scores);
        commit_products();
        wait_products<0>(scores);
        scale(scores, kv_uses);
        from.kv.release(kv_uses);
        mask_and_update(walk, 0, kv_uses + 1, scores, softmax);
        softmax.round(scores);
        for (int block = 1; block < walk.blocks; block++, kv_uses += 2) {
            from.kv.wait_full(kv_uses + 2);
            from.kv.wait_full(kv_uses + 1);
            wait_order();
            begin_products(scores, softmax.out, softmax.weights);
            multiply_qk(scores, 2);
            commit_products();
            multiply_pv(softmax);
            commit_products();
            pass_order();
            wait_products<1>(scores);
            scale(scores, kv_uses + 2);
            from.kv.release(kv_uses + 2);
            mask_and_update(walk, block, kv_uses + 3, scores, softmax);
            wait_products<0>(softmax.out, softmax.weights);
            from.kv.release(kv_uses + 1);
            softmax.rescale();
            softmax.round(scores);
        }
        from.kv.wait_full(kv_uses + 1);
        begin_products(softmax.out, softmax.weights);
        multiply_pv(softmax);
        commit_products();
        wait_products<0>(softmax.out, softmax.weights);
        from.kv.release(kv_uses + 1);
        kv_uses += 2;
    }

    WR_DEV void wait_order() { wait_phase(from.order + number, order_uses++ % 2); }
    WR_DEV void pass_order() const {
        if (lane() == 0) arrive(from.order + (1 - number));
    }

    // Scores of the keys `ahead` uses from now.
    WR_DEV void multiply_qk(float (&scores)[KEYS / 2], int ahead = 0) const {
        const char* queries = from.q.at(q_uses) + number * OWN_ROWS * ROW_BYTES;
        const char* keys = from.kv.at(kv_uses + ahead);
        WR_UNROLL
        for (int k = 0; k < D / 16; k++) {
            int column = k / 4, offset = k % 4 * 32;
            uint64_t a = deep_operand(queries + column * ROWS * ROW_BYTES + offset);
            uint64_t b = deep_operand(keys + column * KEYS * ROW_BYTES + offset);
            multiply<T>(scores, a, b, k == 0);
        }
    }

    WR_DEV void multiply_pv(Softmax<T, D>& softmax) const {
        const char* values = from.kv.at(kv_uses + 1);
        WR_UNROLL
        for (int k = 0; k < KEYS / 16; k++) {
            uint64_t b = wide_operand(values + k * TILE * ROW_BYTES, KEYS * ROW_BYTES);
            multiply<T>(softmax.out, softmax.weights[k], b);
        }
    }

    // Scores of quantized keys by their scales, or weights by those of the values.
    WR_DEV void scale(float (&scores)[KEYS / 2], int kv_use) const {
        if constexpr (Params::HAS_SCALES) {
            const float* scales = from.scales(kv_use) + lane() % 4 * 2;
            WR_UNROLL
            for (int n = 0; n < KEYS / 8; n++) {
                Words2 pair = load_shared(reinterpret_cast<const Words2*>(scales + 8 * n));
                WR_UNROLL
                for (int i = 0; i < 4; i++) scores[4 * n + i] *= float_of(pair.w[i % 2]);
            }
        }
    }

    // Makes weights of the scores of block `block`, whose values are use `values`.
    WR_DEV void mask_and_update(const Walk& walk, int block, int values, float (&scores)[KEYS / 2],
                      Softmax<T, D>& softmax) const {
        int first_token = block * KEYS, position = walk.position;
        if (first_token + KEYS > position + number * OWN_ROWS / p.of.group + 1) {
            WR_UNROLL
            for (int h = 0; h < 2; h++) {
                int seen = position + row_of(h) / p.of.group + 1 - first_token;
                seen -= static_cast<int>(lane()) % 4 * 2;
                WR_UNROLL
                for (int n = 0; n < KEYS / 8; n++)
                    WR_UNROLL
                    for (int i = 0; i < 2; i++)
                        if (8 * n + i >= seen) scores[4 * n + 2 * h + i] = NEVER;
            }
        }
        softmax.update(scores, p.of.scale_log2);
        if constexpr (Params::HAS_SCALES) {
            from.kv.wait_full(values);
            scale(scores, values);
        }
    }

    // What a piece of the keys gave the rows, normalized.
    WR_DEV void write_partial(const Walk& walk, int first_slot,
                              const Softmax<T, D>& softmax) const {
        int l = static_cast<int>(lane()), count = walk.item.tokens * p.of.group;
        int64_t heads = int64_t{1} * p.of.kv_heads * p.of.group;
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int row = row_of(h);
            float sum = softmax.sum[h];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
            if (row >= count) continue;
            int64_t slot = first_slot + row / p.of.group;
            int64_t place = slot * heads + walk.kv_head * p.of.group + row % p.of.group;
            float scale = 1 / sum;
            float* to = p.of.partial + place * D + l % 4 * 2;
            WR_UNROLL
            for (int n = 0; n < D / 8; n++) {
                const float* pair = &softmax.out[4 * n + 2 * h];
                Words2 words{bits_of(pair[0] * scale), bits_of(pair[1] * scale)};
                store(reinterpret_cast<Words2*>(to + 8 * n), words);
            }
            if (l % 4 == 0)
                store(p.of.partial_lse + place,
                      softmax.largest[h] * p.of.scale_log2 + log2_fast(sum));
        }
    }

    // Normalizes and writes the rows, by way of their queries' stage, so that lanes next to each
    // other write next to each other.
    WR_DEV void write(const Walk& walk, Softmax<T, D>& softmax) const {
        char* own = from.q.at(q_uses);
        int l = static_cast<int>(lane()), count = walk.item.tokens * p.of.group;
        sync_warpgroup();  // all have done with the queries
        WR_UNROLL
        for (int h = 0; h < 2; h++) {
            int row = row_of(h);
            float sum = softmax.sum[h];
            sum += shfl_xor(sum, 1);
            sum += shfl_xor(sum, 2);
            float scale = 1 / sum;
            WR_UNROLL
            for (int n = 0; n < D / 8; n++) {
                const float* pair = &softmax.out[4 * n + 2 * h];
                char* to = at_swizzled(own, ROWS, row, n) + l % 4 * 4;
                store_shared(reinterpret_cast<uint32_t*>(to),
                             pack<T>(pair[0] * scale, pair[1] * scale));
            }
            if (p.of.lse != nullptr && l % 4 == 0 && row < count) {
                float lse = softmax.largest[h] * p.of.scale_log2 + log2_fast(sum);
                int64_t token = walk.item.token + row / p.of.group;
                int64_t head = walk.kv_head * p.of.group + row % p.of.group;
                store(p.of.lse + token * p.of.lse_token + head * p.of.lse_head, lse);
            }
        }
        sync_warp();
        constexpr int CHUNKS = D / 8, STEP = 32 / CHUNKS;
        int first = row_of(0) - l / 4;
        for (int row = first + l / CHUNKS; row < first + 16 && row < count; row += STEP) {
            int64_t token = walk.item.token + row / p.of.group;
            int64_t head = walk.kv_head * p.of.group + row % p.of.group;
            const char* at = at_swizzled(own, ROWS, row, l % CHUNKS);
            uint16_t* to = p.of.out + token * p.of.out_row + head * p.of.out_head;
            store(reinterpret_cast<Words4*>(to + l % CHUNKS * 8),
                  load_shared(reinterpret_cast<const Words4*>(at)));
        }
    }
};

// Nothing on GPUs without these instructions: the host does not choose it there.
template <class T, int D, class Producer, class Params>
WR_DEV void run(const Params& p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    Shared<D> stages;
    int group = warpgroup();
    if (thread() == 0) {
        Producer::prefetch_maps(p);
        stages.init();
        fence_async();
    }
    sync_cta();
    if (group == 0) {
        give_registers<Producer::REGISTERS>();
        Producer{p, stages}.run();
    } else {
        take_registers<Producer::CONSUMER_REGISTERS>();
        Consumer<T, D, Params>{p, stages, group - 1}.run();
    }
#endif
}

template <class T, int D>
WR_KERNEL(THREADS, 1) kernel(WR_PARAMS Params p) {
    run<T, D, Producer<D>>(p);
}

}  // namespace wr::prefill_wgmma
