// The C entry of append: checks, then one launch. See `append.cuh` for what runs.

#include "append.cuh"

#include "abi.h"

namespace wr::append {
namespace {

template <class T, class Store>
void launch_for(int64_t head_dim, const Params& params, void* stream) {
    auto run = head_dim == 64 ? kernel<T, Store, 64> : kernel<T, Store, 128>;
    int64_t rows_per_cta = THREADS / (head_dim / 16);
    launch(run, "append", (params.rows + rows_per_cta - 1) / rows_per_cta, 1, THREADS, 0, stream,
           params);
}

template <class T>
void launch_for(int32_t stored, int64_t head_dim, const Params& params, void* stream) {
    if (stored == I8) return launch_for<T, Int8>(head_dim, params, stream);
    if (stored == E4M3) return launch_for<T, E4m3>(head_dim, params, stream);
    launch_for<T, Plain>(head_dim, params, stream);
}

Rows rows_of(const wr_tensor* tensor, const char* name, int32_t dtype, int64_t tokens,
             int64_t heads, int64_t head_dim) {
    auto data = need_tensor(tensor, name, {dtype}, {tokens, heads, head_dim});
    need_rows_of_16_bytes(tensor, name);
    return {static_cast<const uint16_t*>(data), tensor->stride[0], tensor->stride[1]};
}

// What was asked for, checked; names are those of the arguments.
struct Call {
    const wr_tensor *q, *k, *v, *cos, *sin, *positions, *slots, *q_weight, *k_weight, *q_out,
        *k_pages, *v_pages, *k_scales, *v_scales;
    Params params{};
    int64_t tokens = 0, head_dim = 0;

    void check(double eps) {
        need(q && k && q->dims == 3 && k->dims == 3, "q and k", "need [tokens, heads, head_dim]");
        tokens = q->shape[0];
        head_dim = q->shape[2];
        need(head_dim == 64 || head_dim == 128, "q",
             "has head_dim " + std::to_string(head_dim) + ", append has 64 and 128");
        need_tensor(q, "q", {BF16, F16}, {tokens, q->shape[1], head_dim});
        int64_t heads = q->shape[1], kv_heads = k->shape[1];
        need(heads >= 1 && kv_heads >= 1 && heads <= 4096 && kv_heads <= 4096, "q and k",
             "need 1 to 4096 heads");
        params.q = rows_of(q, "q", q->dtype, tokens, heads, head_dim);
        params.k = rows_of(k, "k", q->dtype, tokens, kv_heads, head_dim);
        params.v = rows_of(v, "v", q->dtype, tokens, kv_heads, head_dim);
        Rows out = rows_of(q_out, "q_out", q->dtype, tokens, heads, head_dim);
        params.q_out = const_cast<uint16_t*>(out.data);
        params.q_out_token = out.token;
        params.q_out_head = out.head;
        params.heads = static_cast<int32_t>(heads);
        params.kv_heads = static_cast<int32_t>(kv_heads);
        params.rows = tokens * (heads + 2 * kv_heads);
        check_table();
        check_pages(kv_heads);
        check_weights(eps);
    }

    void check_table() {
        params.cos = static_cast<float*>(need_tensor(cos, "cos", {F32}, {-1, head_dim / 2}));
        int64_t positions_there = cos->shape[0];
        params.sin =
            static_cast<float*>(need_tensor(sin, "sin", {F32}, {positions_there, head_dim / 2}));
        need(cos->stride[0] == sin->stride[0], "sin", "has other strides than cos");
        need(positions_there <= INT32_MAX, "cos", "has more than 2^31 positions");
        need_rows_of_16_bytes(cos, "cos");
        need_rows_of_16_bytes(sin, "sin");
        params.table_row = cos->stride[0];
        params.positions_there = static_cast<uint32_t>(positions_there);
        auto row_of_tokens = [&](const wr_tensor* tensor, const char* name) {
            auto data = need_tensor(tensor, name, {I64}, {tokens});
            need_dense_rows(tensor, name);
            return static_cast<const int64_t*>(data);
        };
        params.positions = row_of_tokens(positions, "positions");
        params.slots = row_of_tokens(slots, "slots");
    }

    void check_pages(int64_t kv_heads) {
        need(k_pages != nullptr, "k_pages", "is missing");
        int32_t stored = k_pages->dtype;
        bool is_plain = stored == q->dtype;
        params.k_pages = need_tensor(k_pages, "k_pages", {q->dtype, I8, E4M3},
                                     {-1, -1, kv_heads, head_dim});
        int64_t pages = k_pages->shape[0], page_tokens = k_pages->shape[1];
        params.v_pages =
            need_tensor(v_pages, "v_pages", {stored}, {pages, page_tokens, kv_heads, head_dim});
        need_rows_of_16_bytes(k_pages, "k_pages");
        need_rows_of_16_bytes(v_pages, "v_pages");
        need(pages <= INT32_MAX / page_tokens, "k_pages", "has 2^31 tokens or more");
        params.slots_there = static_cast<uint32_t>(pages * page_tokens);
        params.page_tokens = static_cast<uint32_t>(page_tokens);
        params.k_page = k_pages->stride[0];
        params.k_token = k_pages->stride[1];
        params.k_head = k_pages->stride[2];
        params.v_page = v_pages->stride[0];
        params.v_token = v_pages->stride[1];
        params.v_head = v_pages->stride[2];
        need(is_plain == (k_scales == nullptr) && is_plain == (v_scales == nullptr),
             "k_scales and v_scales", "go with quantized pages, and only with them");
        if (is_plain) return;
        auto k_at = need_tensor(k_scales, "k_scales", {F32}, {pages, page_tokens, -1});
        auto v_at = need_tensor(v_scales, "v_scales", {F32}, {pages, page_tokens, -1});
        need(k_scales->shape[2] == kv_heads && v_scales->shape[2] == kv_heads,
             "k_scales and v_scales", "need as many heads as k");
        params.k_scales = static_cast<float*>(k_at);
        params.v_scales = static_cast<float*>(v_at);
        params.k_scale_page = k_scales->stride[0];
        params.k_scale_token = k_scales->stride[1];
        params.k_scale_head = k_scales->stride[2];
        params.v_scale_page = v_scales->stride[0];
        params.v_scale_token = v_scales->stride[1];
        params.v_scale_head = v_scales->stride[2];
    }

    void check_weights(double eps) {
        need((q_weight == nullptr) == (k_weight == nullptr), "q_weight and k_weight",
             "go together, or neither is there");
        if (q_weight == nullptr) return;
        need(eps >= 0 && eps < 1, "eps", "is not in [0, 1)");
        auto q_at = need_tensor(q_weight, "q_weight", {q->dtype}, {head_dim});
        auto k_at = need_tensor(k_weight, "k_weight", {q->dtype}, {head_dim});
        need_rows_of_16_bytes(q_weight, "q_weight");
        need_rows_of_16_bytes(k_weight, "k_weight");
        params.q_weight = static_cast<const uint16_t*>(q_at);
        params.k_weight = static_cast<const uint16_t*>(k_at);
        params.eps = static_cast<float>(eps);
    }
};

}  // namespace
}  // namespace wr::append

// q [T, H, D] -> q_out, k and v [T, KH, D] -> pages [page, token, KH, D] at `slots` (-1: nowhere),
// q and k turned by `positions`. Scales [page, token, KH] where pages are INT8 or FP8 e4m3.
WR_EXPORT int wr_append(const wr_tensor* q, const wr_tensor* k, const wr_tensor* v,
                        const wr_tensor* cos, const wr_tensor* sin, const wr_tensor* positions,
                        const wr_tensor* slots, const wr_tensor* q_weight,
                        const wr_tensor* k_weight, double eps, const wr_tensor* q_out,
                        const wr_tensor* k_pages, const wr_tensor* v_pages,
                        const wr_tensor* k_scales, const wr_tensor* v_scales, void* stream) {
    return wr::guarded([&] {
        wr::append::Call call{q,        k,     v,       cos,     sin,      positions, slots,
                              q_weight, k_weight, q_out, k_pages, v_pages, k_scales,  v_scales};
        call.check(eps);
        auto run = q->dtype == wr::BF16 ? wr::append::launch_for<wr::Bf16>
                                        : wr::append::launch_for<wr::Fp16>;
        run(k_pages->dtype, call.head_dim, call.params, stream);
    });
}
