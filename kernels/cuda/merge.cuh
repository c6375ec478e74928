// Merge: the partial results of a request, weighted by their log-sum-exps, into its output.
//
// A warp has one head of one request. Which slots are whose is a CSR, so that items that several
// requests share can be merged by the same pass. Requests without slots are left alone: their one
// item has written them.
//
// A dependent launch: it begins while the kernel before it ends, and reads its part of the plan by
// then, which is older than both.
#pragma once

#include "dev.cuh"

namespace wr::merge {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr float NEVER = -__builtin_inff();

struct Params {
    float *partial, *partial_lse;  // [slot, head, D] and base 2 [slot, head], dense
    const int32_t *starts, *slots;       // slots of request r: slots[starts[r]:starts[r + 1]]
    uint16_t* out;                       // [request, head, D]
    int64_t out_request, out_head;
    int32_t heads;
    float* lse;  // [request, head], base 2; may be null
    int64_t lse_request, lse_head;
};

template <class T, int D>
WR_KERNEL(THREADS, 8) kernel(WR_PARAMS Params p) {
    int64_t request = cta_x();
    int head = static_cast<int>(cta_y() * WARPS + warp());
    int first = load(p.starts + request), end = load(p.starts + request + 1);
    int own = first + static_cast<int>(lane());
    int64_t slot = own < end ? load(p.slots + own) : 0;
    wait_prerequisite_grids();  // by those without work, too: this grid ends after the one before
    if (head >= p.heads || first == end) return;
    constexpr int OWN = D / 32;  // dimensions of a lane
    float largest = NEVER;
    for (int at = own; at < end; at += 32) {
        if (at != own) slot = load(p.slots + at);
        largest = larger(largest, load(p.partial_lse + slot * p.heads + head));
    }
    WR_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) largest = larger(largest, shfl_xor(largest, mask));
    float sum = 0, out[OWN] = {};
    for (int at = first; at < end; at++) {
        int64_t row = load(p.slots + at) * static_cast<int64_t>(p.heads) + head;
        float lse = load(p.partial_lse + row);
        float weight = lse == NEVER ? 0 : exp2_fast(lse - largest);
        sum += weight;
        const float* values = p.partial + row * D + static_cast<int>(lane()) * OWN;
        WR_UNROLL
        for (int pair = 0; pair < OWN / 2; pair++) {
            Words2 words = load(reinterpret_cast<const Words2*>(values) + pair);
            out[2 * pair] += weight * float_of(words.w[0]);
            out[2 * pair + 1] += weight * float_of(words.w[1]);
        }
    }
    if (p.lse != nullptr && lane() == 0)
        store(p.lse + request * p.lse_request + head * p.lse_head, largest + log2_fast(sum));
    float scale = sum > 0 || is_nan(sum) ? 1 / sum : 0;
    uint16_t* to = p.out + request * p.out_request + head * p.out_head;
    WR_UNROLL
    for (int pair = 0; pair < OWN / 2; pair++)
        store(reinterpret_cast<uint32_t*>(to) + static_cast<int>(lane()) * OWN / 2 + pair,
              pack<T>(out[2 * pair] * scale, out[2 * pair + 1] * scale));
}

}  // namespace wr::merge
