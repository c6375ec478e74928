// The C entries of prefill: checks, then one launch. See `prefill.cuh` for what runs, and
// `prefill_wgmma.cuh` for what runs on Hopper.

#include "prefill.cuh"

#include <cstdlib>
#include <string_view>

#include "abi.h"
#include "paged_checks.h"
#include "prefill_quantized.cuh"
#include "prefill_wgmma.h"

namespace wr::prefill {
namespace {

template <class T, int D>
void launch_wide(const ParamsOver<Pages>& params, int64_t items, void* stream) {
    launch(kernel<T, D>, "prefill", items * params.kv_heads, 1, THREADS,
           SHARED_BYTES<WideKeys<D>>, stream, params);
}

struct Call {
    const wr_tensor *q, *k_pages, *v_pages, *page_table, *item_count, *items, *out, *lse,
        *k_scales, *v_scales;
    Params params{};
    EitherPages pages{};
    int64_t tokens = 0, head_dim = 0, most_items = 0;

    void check(double scale) {
        head_dim = need_head_dim(q, "tokens", "prefill");
        tokens = q->shape[0];
        params.scale_log2 = need_scale(scale);
        pages = need_either_pages(q, k_pages, v_pages, k_scales, v_scales, "prefill");
        check_heads();
        check_plan();
        check_lse();
    }

    void check_heads() {
        CheckedHeads checked = need_heads(q, out, k_pages->shape[2], ROWS, "prefill");
        params.q = checked.q;
        params.q_token = checked.q_row;
        params.q_head = checked.q_head;
        params.out = checked.out;
        params.out_token = checked.out_row;
        params.out_head = checked.out_head;
        params.kv_heads = static_cast<int32_t>(k_pages->shape[2]);
        params.group = checked.group;
    }

    void check_plan() {
        params.page_table = plan_part(page_table, "page_table", {-1, -1});
        params.table_row = page_table->stride[0];
        params.item_count = plan_part(item_count, "item_count", {1});
        need(items && items->dims == 2, "items", "needs [items, 4]");
        most_items = items->shape[0];
        auto at = plan_part(items, "items", {most_items, 4});
        need_rows_of_16_bytes(items, "items");
        need(items->stride[0] == 4 || most_items <= 1, "items", "is not dense");
        params.items = reinterpret_cast<const Item*>(at);
    }

    void check_lse() {
        if (lse == nullptr) return;
        params.lse = static_cast<float*>(need_tensor(lse, "lse", {F32}, {tokens, q->shape[1]}));
        params.lse_token = lse->stride[0];
        params.lse_head = lse->stride[1];
    }

    void run(void* stream) const {
        bool is_bf16 = q->dtype == BF16, is_narrow = head_dim == 64;
        auto bf16 = is_narrow ? launch_wide<Bf16, 64> : launch_wide<Bf16, 128>;
        auto fp16 = is_narrow ? launch_wide<Fp16, 64> : launch_wide<Fp16, 128>;
        if (pages.is_quantized)
            prefill_quantized::launch_stored(is_bf16, k_pages->dtype, head_dim, most_items,
                                          {params, pages.bytes}, stream);
        else
            (is_bf16 ? bf16 : fp16)({params, pages.wide}, most_items, stream);
    }
};

// Which kernel; FITTING: that of the device, or the one that WARMROUTE_PREFILL names.
enum class Way { FITTING, MMA, WGMMA };

Way named_way() {
    const char* name = getenv("WARMROUTE_PREFILL");
    std::string_view way = name ? name : "";
    need(way.empty() || way == "mma" || way == "wgmma", "WARMROUTE_PREFILL",
         "is " + std::string(way) + ", there are mma and wgmma");
    return way == "mma" ? Way::MMA : way == "wgmma" ? Way::WGMMA : Way::FITTING;
}

int enter(Way way, double scale, void* stream, Call call) {
    return guarded([&] {
        call.check(scale);
        if (way == Way::FITTING) way = named_way();
        if (way == Way::MMA || call.pages.is_quantized) return call.run(stream);
        ParamsOver<Pages> params{call.params, call.pages.wide};
        prefill_wgmma::Extents extents{call.tokens, call.head_dim, call.k_pages->shape[0],
                                       call.most_items, call.q->dtype};
        std::string unfit = prefill_wgmma::unsupported(params, extents);
        need(way == Way::FITTING || unfit.empty(), "wgmma:", unfit);
        if (unfit.empty() && (way == Way::WGMMA || is_hopper()))
            return prefill_wgmma::run(params, extents, stream);
        call.run(stream);
    });
}

}  // namespace
}  // namespace wr::prefill

#define WR_PREFILL(name, way)                                                                  \
    WR_EXPORT int name(const wr_tensor* q, const wr_tensor* k_pages, const wr_tensor* v_pages,  \
                       const wr_tensor* page_table, const wr_tensor* item_count,               \
                       const wr_tensor* items, double scale, const wr_tensor* out,             \
                       const wr_tensor* lse, const wr_tensor* k_scales,                        \
                       const wr_tensor* v_scales, void* stream) {                              \
        return wr::prefill::enter(way, scale, stream,                                          \
                                  {q, k_pages, v_pages, page_table, item_count, items, out,    \
                                   lse, k_scales, v_scales});                                  \
    }

// q [T, H, D] over pages [page, token, KH, D] by page_table [R, pages] -> out [T, H, D] and, where
// given, lse [T, H]. The plan (item_count [1], items [N, 4]) is that of
// `plan_prefill` (`kvkernels/ops/prefill.py`). Scales [page, token, KH] where pages are INT8 or FP8
// e4m3, which have one kernel.
WR_PREFILL(wr_prefill, wr::prefill::Way::FITTING)
// One of the two by name, for comparisons.
WR_PREFILL(wr_prefill_mma, wr::prefill::Way::MMA)
WR_PREFILL(wr_prefill_wgmma, wr::prefill::Way::WGMMA)
