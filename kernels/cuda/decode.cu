// The C entry of decode: checks, the items, then the merge. See `decode.cuh` and `merge.cuh`.

#include "decode.cuh"

#include "abi.h"
#include "decode_quantized.cuh"
#include "paged_checks.h"

namespace wr::decode {
namespace {

constexpr int MAX_GROUP = 16;

template <class T, int D>
void launch_wide(const ParamsOver<Pages>& params, int64_t items, void* stream) {
    int64_t kv_heads = params.heads / params.group;
    auto run = params.group <= 8 ? kernel<T, D, 1> : kernel<T, D, 2>;
    launch(run, "decode", items, kv_heads, THREADS, SHARED_BYTES<WideTiles<T, D>>, stream, params);
}

struct Call {
    const wr_tensor *q, *k_pages, *v_pages, *page_table, *item_count, *items, *merge_starts,
        *merge_slots, *out, *partial, *partial_lse, *k_scales, *v_scales;
    Params params{};
    merge::Params merging{};
    CheckedHeads heads{};
    EitherPages pages{};
    int64_t requests = 0, head_dim = 0, most_items = 0;

    void check(double scale) {
        head_dim = need_head_dim(q, "requests", "decode");
        requests = q->shape[0];
        params.scale_log2 = need_scale(scale);
        pages = need_either_pages(q, k_pages, v_pages, k_scales, v_scales, "decode");
        heads = need_heads(q, out, k_pages->shape[2], MAX_GROUP, "decode");
        take_heads(params, heads);
        check_plan();
    }

    void check_plan() {
        params.page_table = plan_part(page_table, "page_table", {requests, -1});
        params.table_row = page_table->stride[0];
        params.item_count = plan_part(item_count, "item_count", {1});
        need(items != nullptr, "items", "is missing");
        most_items = items->shape[0];
        auto at = plan_part(items, "items", {most_items, 4});
        need_rows_of_16_bytes(items, "items");
        need(items->stride[0] == 4 || most_items <= 1, "items", "is not dense");
        params.items = reinterpret_cast<const Item*>(at);
        merging = need_partials(merge_starts, merge_slots, partial, partial_lse, heads, requests,
                                head_dim);
        params.partial = merging.partial;
        params.partial_lse = merging.partial_lse;
    }

    void run(void* stream) const {
        if (most_items == 0) return;
        bool is_bf16 = q->dtype == BF16, is_narrow = head_dim == 64;
        auto bf16 = is_narrow ? launch_wide<Bf16, 64> : launch_wide<Bf16, 128>;
        auto fp16 = is_narrow ? launch_wide<Fp16, 64> : launch_wide<Fp16, 128>;
        if (pages.is_quantized)
            decode_quantized::launch_stored(is_bf16, k_pages->dtype, head_dim, most_items,
                                         {params, pages.bytes}, stream);
        else
            (is_bf16 ? bf16 : fp16)({params, pages.wide}, most_items, stream);
        run_merge(merging, requests, q->dtype, head_dim, stream);
    }
};

}  // namespace
}  // namespace wr::decode

// q [R, H, D] over pages [page, token, KH, D] by page_table [R, pages] -> out [R, H, D]. The plan
// (item_count [1], items [N, 4], merge_starts [R + 1], merge_slots [S]) is that of
// `plan_decode` (`tests/oracles/decode.py`); partial [S, H, D] and partial_lse [S, H] are
// workspace. Scales [page, token, KH] where pages are INT8 or FP8 e4m3.
WR_EXPORT int wr_decode(const wr_tensor* q, const wr_tensor* k_pages, const wr_tensor* v_pages,
                        const wr_tensor* page_table, const wr_tensor* item_count,
                        const wr_tensor* items, const wr_tensor* merge_starts,
                        const wr_tensor* merge_slots, double scale, const wr_tensor* out,
                        const wr_tensor* partial, const wr_tensor* partial_lse,
                        const wr_tensor* k_scales, const wr_tensor* v_scales, void* stream) {
    return wr::guarded([&] {
        using namespace wr::decode;
        Call call{q,            k_pages,     v_pages, page_table, item_count,  items,
                  merge_starts, merge_slots, out,     partial,    partial_lse, k_scales,
                  v_scales};
        call.check(scale);
        call.run(stream);
    });
}
