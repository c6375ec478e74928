// The C entries of prefill: checks, then one launch, and merge where items are pieces. See
// `prefill.cuh` for what runs, and `prefill_wgmma.cuh` for what runs on Hopper.

#include "prefill/prefill.cuh"

#include <cstdlib>
#include <string_view>

#include "abi.h"
#include "paged_checks.h"
#include "prefill/prefill_quantized.cuh"
#include "prefill/prefill_wgmma.h"

namespace wr::prefill {
namespace {

template <class T, int D>
void launch_wide(const ParamsOver<Pages>& params, int64_t items, void* stream) {
    auto run = params.is_cut ? kernel<T, D, true> : kernel<T, D, false>;
    launch(run, "prefill", items * params.kv_heads, 1, THREADS,
           SHARED_BYTES<WideKeys<D>>, stream, params);
}

struct Call {
    const wr_tensor *q, *k_pages, *v_pages, *page_table, *item_count, *items, *out, *lse,
        *k_scales, *v_scales, *merge_starts, *merge_slots, *partial, *partial_lse;
    Params params{};
    merge::Params merging{};
    CheckedHeads heads{};
    EitherPages pages{};
    int64_t tokens = 0, head_dim = 0, most_items = 0;

    void check(double scale) {
        head_dim = need_head_dim(q, "tokens", "prefill");
        tokens = q->shape[0];
        params.scale_log2 = need_scale(scale);
        pages = need_either_pages(q, k_pages, v_pages, k_scales, v_scales, "prefill");
        heads = need_heads(q, out, k_pages->shape[2], ROWS, "prefill");
        take_heads(params, heads);
        params.kv_heads = static_cast<int32_t>(k_pages->shape[2]);
        check_plan();
        check_lse();
    }

    void check_plan() {
        params.page_table = plan_part(page_table, "page_table", {-1, -1});
        params.table_row = page_table->stride[0];
        params.item_count = plan_part(item_count, "item_count", {1});
        need(items && items->dims == 2, "items", "needs [items, 8]");
        most_items = items->shape[0];
        auto at = plan_part(items, "items", {most_items, 8});
        need_rows_of_16_bytes(items, "items");
        need(items->stride[0] == 8 || most_items <= 1, "items", "is not dense");
        params.items = reinterpret_cast<const Item*>(at);
        merging = need_partials(merge_starts, merge_slots, partial, partial_lse, heads, tokens,
                                head_dim);
        params.partial = merging.partial;
        params.partial_lse = merging.partial_lse;
        params.is_cut = partial->shape[0] > 0 && most_items > 0;
    }

    void check_lse() {
        if (lse == nullptr) return;
        params.lse = static_cast<float*>(need_tensor(lse, "lse", {F32}, {tokens, q->shape[1]}));
        params.lse_token = lse->stride[0];
        params.lse_head = lse->stride[1];
        merging.lse = params.lse;
        merging.lse_request = params.lse_token;
        merging.lse_head = params.lse_head;
    }

    void merge(void* stream) const {
        if (params.is_cut) run_merge(merging, tokens, q->dtype, head_dim, stream);
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

template <class Pages>
void run_items(Way way, const Call& call, const Pages& pages, void* stream) {
    ParamsOver<Pages> params{call.params, pages};
    prefill_wgmma::Extents extents{call.tokens, call.head_dim, call.k_pages->shape[0],
                                   call.most_items, call.q->dtype, call.k_pages->dtype};
    std::string unfit = prefill_wgmma::unsupported(params, extents);
    need(way == Way::FITTING || unfit.empty(), "wgmma:", unfit);
    if (unfit.empty() && (way == Way::WGMMA || is_hopper()))
        return prefill_wgmma::run(params, extents, stream);
    call.run(stream);
}

void run_items(Way way, const Call& call, void* stream) {
    if (way == Way::MMA)
        call.run(stream);
    else if (call.pages.is_quantized)
        run_items(way, call, call.pages.bytes, stream);
    else
        run_items(way, call, call.pages.wide, stream);
}

int enter(Way way, double scale, void* stream, Call call) {
    return guarded([&] {
        call.check(scale);
        run_items(way == Way::FITTING ? named_way() : way, call, stream);
        call.merge(stream);
    });
}

}  // namespace
}  // namespace wr::prefill

#define WR_PREFILL(name, way)                                                                  \
    WR_EXPORT int name(const wr_tensor* q, const wr_tensor* k_pages, const wr_tensor* v_pages,  \
                       const wr_tensor* page_table, const wr_tensor* item_count,               \
                       const wr_tensor* items, const wr_tensor* merge_starts,                  \
                       const wr_tensor* merge_slots, double scale, const wr_tensor* out,       \
                       const wr_tensor* lse, const wr_tensor* partial,                         \
                       const wr_tensor* partial_lse, const wr_tensor* k_scales,                \
                       const wr_tensor* v_scales, void* stream) {                              \
        return wr::prefill::enter(way, scale, stream,                                          \
                                  {q, k_pages, v_pages, page_table, item_count, items, out,    \
                                   lse, k_scales, v_scales, merge_starts, merge_slots,         \
                                   partial, partial_lse});                                     \
    }

// q [T, H, D] over pages [page, token, KH, D] by page_table [R, pages] -> out [T, H, D] and, where
// given, lse [T, H]. The plan (item_count [1], items [N, 8], merge_starts [T + 1], merge_slots [S])
// is that of `plan_prefill` (`kvkernels/ops/prefill.py`); partial [S, H, D] and partial_lse [S, H]
// are workspace. Nothing is merged where S is 0. Scales [page, token, KH] where pages are INT8 or
// FP8 e4m3.
WR_PREFILL(wr_prefill, wr::prefill::Way::FITTING)
// One of the two by name, for comparisons.
WR_PREFILL(wr_prefill_mma, wr::prefill::Way::MMA)
WR_PREFILL(wr_prefill_wgmma, wr::prefill::Way::WGMMA)
