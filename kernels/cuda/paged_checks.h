// What the C entries of attention over pages check alike. `kernel` is its name, for people.
#pragma once

#include <cmath>
#include <initializer_list>
#include <string>

#include "abi.h"
#include "byte_ring.cuh"
#include "merge.cuh"

namespace wr {

// Strides count elements.
struct CheckedPages {
    void *k, *v;
    int64_t page, token, kv_head;
    int32_t tiles_per_page;
};

struct CheckedHeads {  // q and out [row, head, head_dim]
    const uint16_t* q;
    uint16_t* out;
    int64_t q_row, q_head, out_row, out_head;
    int32_t heads, group;
};

inline int64_t need_head_dim(const wr_tensor* q, const char* rows, const std::string& kernel) {
    need(q && q->dims == 3, "q", "needs [" + std::string(rows) + ", heads, head_dim]");
    int64_t head_dim = q->shape[2];
    need(head_dim == 64 || head_dim == 128, "q",
         "has head_dim " + std::to_string(head_dim) + ", " + kernel + " has 64 and 128");
    return head_dim;
}

// The scale of scores as a factor of base-2 exponents.
inline float need_scale(double scale) {
    need(std::isfinite(scale) && scale > 0, "scale", "is not above 0");
    return static_cast<float>(scale * 1.4426950408889634);
}

inline CheckedPages need_pages(const wr_tensor* k_pages, const wr_tensor* v_pages,
                               std::initializer_list<int32_t> dtypes, int64_t head_dim,
                               int64_t tile_tokens, const std::string& kernel) {
    need(k_pages && v_pages && k_pages->dims == 4 && v_pages->dims == 4, "k_pages and v_pages",
         "need [page, token, kv head, head_dim]");
    auto k = need_tensor(k_pages, "k_pages", dtypes, {-1, -1, -1, head_dim});
    const int64_t *shape = k_pages->shape, *stride = k_pages->stride;
    auto v = need_tensor(v_pages, "v_pages", {k_pages->dtype},
                         {shape[0], shape[1], shape[2], head_dim});
    need_rows_of_16_bytes(k_pages, "k_pages");
    need_rows_of_16_bytes(v_pages, "v_pages");
    need(shape[1] % tile_tokens == 0 && shape[1] <= (1 << 20), "k_pages",
         "has pages of " + std::to_string(shape[1]) + " tokens, " + kernel +
             " has multiples of 16 up to 2^20");
    for (int d = 0; d < 3; d++)
        need(stride[d] == v_pages->stride[d], "v_pages", "has other strides than k_pages");
    auto tiles_per_page = static_cast<int32_t>(shape[1] / tile_tokens);
    return {k, v, stride[0], stride[1], stride[2], tiles_per_page};
}

// Pages of one cache: of 16 bits, or of bytes with scales. The other ones are empty.
struct EitherPages {
    Pages wide;
    BytePages bytes;
    bool is_quantized;
};

inline void need_scales(const wr_tensor* k_scales, const wr_tensor* v_scales,
                        const int64_t* pages_shape, BytePages& pages) {
    auto scales = [&](const wr_tensor* tensor, const char* name) {
        auto data = need_tensor(tensor, name, {F32},
                                {pages_shape[0], pages_shape[1], pages_shape[2]});
        const int64_t *shape = pages_shape, *stride = tensor->stride;
        need(stride[1] == 1, name, "does not have a page's tokens side by side");
        need(reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                 (shape[0] == 1 || stride[0] % 4 == 0) && (shape[2] == 1 || stride[2] % 4 == 0),
             name, "does not begin pages and heads at multiples of 16 bytes");
        return static_cast<const float*>(data);
    };
    pages.k_scales = scales(k_scales, "k_scales");
    pages.v_scales = scales(v_scales, "v_scales");
    pages.scale_page = k_scales->stride[0];
    pages.scale_kv_head = k_scales->stride[2];
    need(pages.scale_page == v_scales->stride[0] && pages.scale_kv_head == v_scales->stride[2],
         "v_scales", "has other strides than k_scales");
}

template <class Into>
Into strided(const CheckedPages& checked) {
    Into pages{};
    pages.k = static_cast<decltype(pages.k)>(checked.k);
    pages.v = static_cast<decltype(pages.v)>(checked.v);
    pages.page = checked.page;
    pages.token = checked.token;
    pages.kv_head = checked.kv_head;
    pages.tiles_per_page = checked.tiles_per_page;
    return pages;
}

// Pages of q's dtype, or quantized ones with their scales.
inline EitherPages need_either_pages(const wr_tensor* q, const wr_tensor* k_pages,
                                     const wr_tensor* v_pages, const wr_tensor* k_scales,
                                     const wr_tensor* v_scales, const std::string& kernel) {
    CheckedPages checked =
        need_pages(k_pages, v_pages, {q->dtype, I8, E4M3}, q->shape[2], TILE, kernel);
    EitherPages found{};
    found.is_quantized = k_pages->dtype == I8 || k_pages->dtype == E4M3;
    need(found.is_quantized == (k_scales != nullptr) &&
             found.is_quantized == (v_scales != nullptr),
         "k_scales and v_scales", "go with quantized pages, and only with them");
    if (found.is_quantized) {
        found.bytes = strided<BytePages>(checked);
        need_scales(k_scales, v_scales, k_pages->shape, found.bytes);
    } else {
        found.wide = strided<Pages>(checked);
    }
    return found;
}

inline CheckedHeads need_heads(const wr_tensor* q, const wr_tensor* out, int64_t kv_heads,
                               int64_t most_group, const std::string& kernel) {
    int64_t rows = q->shape[0], heads = q->shape[1], head_dim = q->shape[2];
    need(heads % kv_heads == 0 && heads / kv_heads >= 1 && heads / kv_heads <= most_group, "q",
         "has " + std::to_string(heads) + " heads for " + std::to_string(kv_heads) +
             " KV heads, " + kernel + " has groups of 1 to " + std::to_string(most_group));
    need(heads <= 4096, "q", "has more than 4096 heads");
    auto from = need_tensor(q, "q", {BF16, F16}, {rows, heads, head_dim});
    auto to = need_tensor(out, "out", {q->dtype}, {rows, heads, head_dim});
    need_rows_of_16_bytes(q, "q");
    need_rows_of_16_bytes(out, "out");
    return {static_cast<const uint16_t*>(from),
            static_cast<uint16_t*>(to),
            q->stride[0],
            q->stride[1],
            out->stride[0],
            out->stride[1],
            static_cast<int32_t>(heads),
            static_cast<int32_t>(heads / kv_heads)};
}

template <class Params>
void take_heads(Params& params, const CheckedHeads& heads) {
    params.q = heads.q;
    params.q_row = heads.q_row;
    params.q_head = heads.q_head;
    params.out = heads.out;
    params.out_row = heads.out_row;
    params.out_head = heads.out_head;
    params.group = heads.group;
}

// Dense int32 of a plan, which the device reads and the host does not.
inline const int32_t* plan_part(const wr_tensor* tensor, const char* name,
                                std::initializer_list<int64_t> shape) {
    auto data = need_tensor(tensor, name, {I32}, shape);
    need_dense_rows(tensor, name);
    return static_cast<const int32_t*>(data);
}

// Where splits of a row's keys store partial results, and which of them are whose: the workspace
// [slots, heads, D] and [slots, heads], and merge's CSR over `rows` of `heads.out`.
inline merge::Params need_partials(const wr_tensor* merge_starts, const wr_tensor* merge_slots,
                                   const wr_tensor* partial, const wr_tensor* partial_lse,
                                   const CheckedHeads& of, int64_t rows, int64_t head_dim) {
    int64_t heads = of.heads, slots = partial ? partial->shape[0] : 0;
    merge::Params merging{};
    merging.partial =
        static_cast<float*>(need_tensor(partial, "partial", {F32}, {slots, heads, head_dim}));
    merging.partial_lse =
        static_cast<float*>(need_tensor(partial_lse, "partial_lse", {F32}, {slots, heads}));
    need_rows_of_16_bytes(partial, "partial");
    need(slots <= 1 ||
             (partial->stride[0] == heads * head_dim && partial_lse->stride[0] == heads),
         "partial and partial_lse", "are not dense");
    need(heads == 1 || slots == 0 ||
             (partial->stride[1] == head_dim && partial_lse->stride[1] == 1),
         "partial and partial_lse", "are not dense");
    merging.starts = plan_part(merge_starts, "merge_starts", {rows + 1});
    merging.slots = plan_part(merge_slots, "merge_slots", {slots});
    merging.out = of.out;
    merging.out_request = of.out_row;
    merging.out_head = of.out_head;
    merging.heads = of.heads;
    return merging;
}

template <class T, int D>
void launch_merge(const merge::Params& merging, int64_t rows, void* stream) {
    int64_t ctas = (merging.heads + merge::WARPS - 1) / merge::WARPS;
    launch(merge::kernel<T, D>, "merge", rows, ctas, merge::THREADS, 0, stream, merging,
           /*is_dependent=*/true);
}

// Right after the launch that stores the partial results.
inline void run_merge(const merge::Params& merging, int64_t rows, int32_t dtype, int64_t head_dim,
                      void* stream) {
    auto bf16 = head_dim == 64 ? launch_merge<Bf16, 64> : launch_merge<Bf16, 128>;
    auto fp16 = head_dim == 64 ? launch_merge<Fp16, 64> : launch_merge<Fp16, 128>;
    (dtype == BF16 ? bf16 : fp16)(merging, rows, stream);
}

}  // namespace wr
