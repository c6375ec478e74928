// The C entry of shared decode: checks, the items, then the merge. See `shared_decode.cuh`.

#include "decode/shared_decode.cuh"

#include <algorithm>
#include "abi.h"
#include "decode/shared_decode_quantized.cuh"
#include "paged_checks.h"

namespace wr::shared_decode {
namespace {

constexpr int MAX_GROUP = 16, CTAS_PER_SM = 2;

template <class T, int D>
void launch_wide(const ParamsOver<Pages>& params, void* stream) {
    constexpr int BYTES = SHARED_BYTES<decode::WideTiles<T, D>, prefill::WideKeys<D>>;
    launch(kernel<T, D>, "shared_decode", params.ctas, params.heads / params.group, THREADS, BYTES,
           stream, params);
}

struct Call {
    const wr_tensor *q, *k_pages, *v_pages, *page_table, *item_count, *items, *members,
        *merge_starts, *merge_slots, *out, *partial, *partial_lse, *k_scales, *v_scales;
    Params params{};
    EitherPages pages{};
    merge::Params merging{};
    CheckedHeads heads{};
    int64_t requests = 0, head_dim = 0;

    void check(double scale) {
        head_dim = need_head_dim(q, "requests", "shared_decode");
        requests = q->shape[0];
        params.scale_log2 = need_scale(scale);
        pages = need_either_pages(q, k_pages, v_pages, k_scales, v_scales, "shared_decode");
        heads = need_heads(q, out, k_pages->shape[2], MAX_GROUP, "shared_decode");
        take_heads(params, heads);
        params.heads = heads.heads;
        check_plan();
        check_workspace();
    }

    void check_plan() {
        params.page_table = plan_part(page_table, "page_table", {requests, -1});
        int64_t width = page_table->shape[1];
        need(requests <= 1 || page_table->stride[0] == width, "page_table", "is not dense");
        need(requests * width <= INT32_MAX, "page_table", "has 2^31 pages or more");
        params.item_count = plan_part(item_count, "item_count", {1});
        params.members = plan_part(members, "members", {requests});
        need(items != nullptr, "items", "is missing");
        int64_t room = items->shape[0];
        auto at = plan_part(items, "items", {room, 8});
        need_rows_of_16_bytes(items, "items");
        need(items->stride[0] == 8 || room <= 1, "items", "is not dense");
        need(room <= (1 << 30), "items", "has room for more than 2^30");
        params.items = reinterpret_cast<const Item*>(at);
        int64_t resident = CTAS_PER_SM * multiprocessors() / k_pages->shape[2];
        params.ctas = static_cast<int32_t>(std::min(room, std::max<int64_t>(resident, 1)));
    }

    void check_workspace() {
        merging = need_partials(merge_starts, merge_slots, partial, partial_lse, heads, requests,
                                head_dim);
        params.partial = merging.partial;
        params.partial_lse = merging.partial_lse;
    }

    void run(void* stream) const {
        if (params.ctas == 0) return;
        bool is_bf16 = q->dtype == BF16, is_narrow = head_dim == 64;
        auto bf16 = is_narrow ? launch_wide<Bf16, 64> : launch_wide<Bf16, 128>;
        auto fp16 = is_narrow ? launch_wide<Fp16, 64> : launch_wide<Fp16, 128>;
        if (pages.is_quantized)
            shared_decode_quantized::launch_stored(is_bf16, k_pages->dtype, head_dim,
                                                   {params, pages.bytes}, stream);
        else
            (is_bf16 ? bf16 : fp16)({params, pages.wide}, stream);
        run_merge(merging, requests, q->dtype, head_dim, stream);
    }
};

}  // namespace
}  // namespace wr::shared_decode

// q [R, H, D] over pages [page, token, KH, D] by page_table [R, pages] -> out [R, H, D]. The plan
// (item_count [1], items [N, 8], members [R], merge_starts [R + 1], merge_slots [S]) is that of
// `plan_shared` (`kvkernels/ops/shared_decode.py`) and says where in the table pages begin. partial
// [S, H, D] and partial_lse [S, H] are workspace. Scales [page, token, KH] where pages are INT8 or
// FP8 e4m3.
WR_EXPORT int wr_shared_decode(const wr_tensor* q, const wr_tensor* k_pages,
                               const wr_tensor* v_pages, const wr_tensor* page_table,
                               const wr_tensor* item_count, const wr_tensor* items,
                               const wr_tensor* members, const wr_tensor* merge_starts,
                               const wr_tensor* merge_slots, double scale, const wr_tensor* out,
                               const wr_tensor* partial, const wr_tensor* partial_lse,
                               const wr_tensor* k_scales, const wr_tensor* v_scales,
                               void* stream) {
    return wr::guarded([&] {
        using namespace wr::shared_decode;
        Call call{q,           k_pages,     v_pages,  page_table, item_count,
                  items,       members,     merge_starts, merge_slots, out,
                  partial,     partial_lse, k_scales, v_scales};
        call.check(scale);
        call.run(stream);
    });
}
