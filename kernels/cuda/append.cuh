// Append: RMS norm of q and k (optional), RoPE, q written out, K and V written to their pages.
//
// A row is one head of one token. D / 16 lanes have a row: each holds 8 dimensions of the first
// half and their partners of the second, so that the rotation needs no neighbour and every access
// is 16 bytes (8 where K and V are quantized). One pass, nothing shared: bytes are what it costs.
#pragma once

#include "dev.cuh"

namespace wr::append {

constexpr int THREADS = 256;
constexpr int HALF = 8;  // dimensions of each half that a lane holds

// Strides count elements. Rows of one token: heads q heads, then kv_heads of K, then of V.
struct Rows {
    const uint16_t* data;
    int64_t token, head;
};

struct Params {
    Rows q, k, v;
    const float *cos, *sin;  // [positions, D / 2]
    int64_t table_row;       // elements from one position to the next, of both
    const int64_t *positions, *slots;
    const uint16_t *q_weight, *k_weight;  // [D], both or neither
    float eps;
    uint16_t* q_out;
    int64_t q_out_token, q_out_head;
    void *k_pages, *v_pages;  // [page, token, head, D]
    int64_t k_page, k_token, k_head, v_page, v_token, v_head;
    float *k_scales, *v_scales;  // [page, token, head]
    int64_t k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head;
    int64_t rows;           // tokens * (heads + 2 * kv_heads)
    uint32_t slots_there;   // pages * page_tokens
    uint32_t page_tokens, positions_there;
    int32_t heads, kv_heads;
};

// How K and V are stored: as they are, or a byte each and a scale per row.
struct Plain {
    static constexpr float LIMIT = 0;
};
struct Int8 {
    static constexpr float LIMIT = 127;
    static WR_DEV uint32_t pack4(const float* x) {
        uint32_t word = 0;
        WR_UNROLL
        for (int i = 0; i < 4; i++) {
            int value = static_cast<int>(nearest(x[i]));
            word |= static_cast<uint32_t>(value & 0xFF) << (8 * i);
        }
        return word;
    }
};
struct E4m3 {
    static constexpr float LIMIT = 448;
    static WR_DEV uint32_t pack4(const float* x) {
        return pack_e4m3(x[0], x[1]) | static_cast<uint32_t>(pack_e4m3(x[2], x[3])) << 16;
    }
};

template <class T>
WR_DEV void widen(const Words4& words, float (&x)[HALF]) {
    WR_UNROLL
    for (int i = 0; i < HALF / 2; i++) {
        x[2 * i] = low<T>(words.w[i]);
        x[2 * i + 1] = high<T>(words.w[i]);
    }
}

template <class T>
WR_DEV Words4 narrow(const float (&x)[HALF]) {
    Words4 words;
    WR_UNROLL
    for (int i = 0; i < HALF / 2; i++) words.w[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    return words;
}

WR_DEV float larger_or_nan(float a, float b) { return is_nan(a) || a > b ? a : b; }

// Sum or largest value over the LANES lanes of a row.
template <int LANES>
WR_DEV float sum_of_row(float x) {
    WR_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) x += shfl_xor(x, mask);
    return x;
}
template <int LANES>
WR_DEV float largest_of_row(float x) {
    WR_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) x = larger_or_nan(x, shfl_xor(x, mask));
    return x;
}

// RMSNorm (Zhang and Sennrich 2019) of a row in float32, rounded only where it is written.
template <class T, int D>
WR_DEV void normalize(float (&a)[HALF], float (&b)[HALF], const uint16_t* weight, float eps,
                      int part) {
    float squares = 0;
    WR_UNROLL
    for (int i = 0; i < HALF; i++) squares += a[i] * a[i] + b[i] * b[i];
    float scale = inverse_sqrt(sum_of_row<D / 16>(squares) / D + eps);
    if (weight == nullptr) return;  // the same for all lanes of a row, but not of the warp
    float wa[HALF], wb[HALF];
    widen<T>(load(reinterpret_cast<const Words4*>(weight + part * HALF)), wa);
    widen<T>(load(reinterpret_cast<const Words4*>(weight + D / 2 + part * HALF)), wb);
    WR_UNROLL
    for (int i = 0; i < HALF; i++) {
        a[i] *= scale * wa[i];
        b[i] *= scale * wb[i];
    }
}

// Rotate-half RoPE (Su et al. 2021): dimension i with i + D / 2.
WR_DEV void rotate(float (&a)[HALF], float (&b)[HALF], const float* cos, const float* sin) {
    WR_UNROLL
    for (int quad = 0; quad < HALF / 4; quad++) {
        Words4 c = load(reinterpret_cast<const Words4*>(cos) + quad);
        Words4 s = load(reinterpret_cast<const Words4*>(sin) + quad);
        WR_UNROLL
        for (int i = 0; i < 4; i++) {
            float first = a[4 * quad + i], second = b[4 * quad + i];
            float cosine = float_of(c.w[i]), sine = float_of(s.w[i]);
            a[4 * quad + i] = first * cosine - second * sine;
            b[4 * quad + i] = second * cosine + first * sine;
        }
    }
}

// Absmax quantization of a row: a scale of its own, never zero, NaN where the row has one.
template <class Store, int D>
WR_DEV void write_quantized(float (&a)[HALF], float (&b)[HALF], float largest, uint8_t* row,
                            float* scale_at, int part) {
    constexpr float TINY = 0x1p-126f;
    float scale = largest / Store::LIMIT;
    if (scale < TINY) scale = TINY;
    WR_UNROLL
    for (int i = 0; i < HALF; i++) {
        a[i] = smaller(larger(a[i] / scale, -Store::LIMIT), Store::LIMIT);
        b[i] = smaller(larger(b[i] / scale, -Store::LIMIT), Store::LIMIT);
    }
    Words2 first{{Store::pack4(a), Store::pack4(a + 4)}};
    Words2 second{{Store::pack4(b), Store::pack4(b + 4)}};
    store(reinterpret_cast<Words2*>(row + part * HALF), first);
    store(reinterpret_cast<Words2*>(row + D / 2 + part * HALF), second);
    if (part == 0) store(scale_at, scale);
}

template <class T, int D>
WR_DEV void write_plain(const float (&a)[HALF], const float (&b)[HALF], uint16_t* row, int part) {
    store(reinterpret_cast<Words4*>(row + part * HALF), narrow<T>(a));
    store(reinterpret_cast<Words4*>(row + D / 2 + part * HALF), narrow<T>(b));
}

template <class T, class Store, int D>
WR_KERNEL(THREADS, 4) kernel(WR_PARAMS Params p) {
    constexpr int LANES = D / 16;
    int64_t row = static_cast<int64_t>(cta_x()) * (THREADS / LANES) + thread() / LANES;
    int part = static_cast<int>(thread()) % LANES;
    // Lanes beyond the last row go along with it, for shuffles, and write nothing.
    bool is_there = row < p.rows;
    if (!is_there) row = p.rows - 1;
    int per_token = p.heads + 2 * p.kv_heads;
    int64_t token = row / per_token;
    int head = static_cast<int>(row - token * per_token);
    bool is_q = head < p.heads, is_k = !is_q && head < p.heads + p.kv_heads;
    if (!is_q) head -= is_k ? p.heads : p.heads + p.kv_heads;

    const Rows& from = is_q ? p.q : is_k ? p.k : p.v;
    const uint16_t* data = from.data + token * from.token + head * from.head;
    float a[HALF], b[HALF];
    widen<T>(load_once(reinterpret_cast<const Words4*>(data + part * HALF)), a);
    widen<T>(load_once(reinterpret_cast<const Words4*>(data + D / 2 + part * HALF)), b);
    if (p.q_weight != nullptr)
        normalize<T, D>(a, b, is_q ? p.q_weight : is_k ? p.k_weight : nullptr, p.eps, part);
    if (is_q || is_k) {
        uint64_t position = static_cast<uint64_t>(load(p.positions + token));
        if (position >= p.positions_there) position = p.positions_there - 1;  // stay in the table
        int64_t at = static_cast<int64_t>(position) * p.table_row + part * HALF;
        rotate(a, b, p.cos + at, p.sin + at);
    }
    float largest = 0;
    if constexpr (Store::LIMIT > 0) {
        WR_UNROLL
        for (int i = 0; i < HALF; i++) {
            largest = larger_or_nan(largest, larger(a[i], -a[i]));
            largest = larger_or_nan(largest, larger(b[i], -b[i]));
        }
        largest = largest_of_row<LANES>(largest);
    }
    if (!is_there) return;
    if (is_q) {
        uint16_t* out = p.q_out + token * p.q_out_token + head * p.q_out_head;
        return write_plain<T, D>(a, b, out, part);
    }
    uint64_t slot = static_cast<uint64_t>(load(p.slots + token));
    if (slot >= p.slots_there) return;  // -1: padding, kept nowhere
    uint32_t page = static_cast<uint32_t>(slot) / p.page_tokens;
    uint32_t offset = static_cast<uint32_t>(slot) % p.page_tokens;
    int64_t at = is_k ? page * p.k_page + offset * p.k_token + head * p.k_head
                      : page * p.v_page + offset * p.v_token + head * p.v_head;
    void* pages = is_k ? p.k_pages : p.v_pages;
    if constexpr (Store::LIMIT > 0) {
        int64_t scale_at =
            is_k ? page * p.k_scale_page + offset * p.k_scale_token + head * p.k_scale_head
                 : page * p.v_scale_page + offset * p.v_scale_token + head * p.v_scale_head;
        float* scales = is_k ? p.k_scales : p.v_scales;
        write_quantized<Store, D>(a, b, largest, static_cast<uint8_t*>(pages) + at,
                                  scales + scale_at, part);
    } else {
        write_plain<T, D>(a, b, static_cast<uint16_t*>(pages) + at, part);
    }
}

}  // namespace wr::append
