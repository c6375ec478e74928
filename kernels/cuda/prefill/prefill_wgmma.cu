// The launch of prefill for Hopper: three tensors described to the copy engine, one kernel.

#include "prefill/prefill_wgmma.h"

#include <algorithm>
#include <numeric>

#include "abi.h"
#include "prefill/prefill_wgmma_quantized.cuh"
#include "tensor_map.h"

namespace wr::prefill_wgmma {
namespace {

int64_t item_tokens(const prefill::Params& params) { return ROWS / params.group; }

Boxed boxed_queries(const prefill::Params& params, const Extents& extents) {
    int64_t heads = int64_t{1} * params.kv_heads * params.group;
    return {params.q,
            {extents.head_dim, heads, extents.tokens, 1},
            {1, params.q_head, params.q_row, 0},
            {ROW_ELEMENTS, params.group, item_tokens(params), 1},
            extents.dtype};
}

// The most that lies in one page wherever 128 keys begin.
int64_t box_tokens(const Pages& pages) {
    return std::gcd(int64_t{1} * pages.tiles_per_page * TILE, int64_t{KEYS});
}

Boxed boxed_pages(const prefill::ParamsOver<Pages>& params, const Extents& extents,
                  const uint16_t* data, int64_t tokens) {
    const Pages& pages = params.pages;
    return {data,
            {extents.head_dim, int64_t{1} * pages.tiles_per_page * TILE, params.kv_heads,
             extents.pages},
            {1, pages.token, pages.kv_head, pages.page},
            {ROW_ELEMENTS, tokens, 1, 1},
            extents.dtype};
}

std::string unsupported_queries(const prefill::Params& params, const Extents& extents) {
#ifdef __CUDACC__  // the emulator has what it needs
    if (!is_hopper()) return "needs a device of compute capability 9.0";
#endif
    std::string why = unboxable(boxed_queries(params, extents));
    return why.empty() ? "" : "q " + why;
}

template <class Pages>
ParamsOver<Pages> params_over(const prefill::ParamsOver<Pages>& of, const Extents& extents) {
    int64_t ctas = std::min(multiprocessors(), extents.items * of.kv_heads);
    return {map_of(boxed_queries(of, extents)), of, static_cast<int32_t>(item_tokens(of)),
            static_cast<int32_t>(ctas)};
}

template <class T, int D>
void launch_for(const Params& params, void* stream) {
    launch(kernel<T, D>, "prefill_wgmma", params.ctas, 1, THREADS, SHARED_BYTES<D>, stream, params);
}

}  // namespace

std::string unsupported(const prefill::ParamsOver<BytePages>& params, const Extents& extents) {
    return unsupported_queries(params, extents);
}

std::string unsupported(const prefill::ParamsOver<Pages>& params, const Extents& extents) {
    std::string why = unsupported_queries(params, extents);
    if (!why.empty()) return why;
    why = unboxable(boxed_pages(params, extents, params.pages.k, KEYS));
    if (!why.empty()) return "k_pages " + why;
    why = unboxable(boxed_pages(params, extents, params.pages.v, KEYS));
    return why.empty() ? "" : "v_pages " + why;
}

void run(const prefill::ParamsOver<Pages>& of, const Extents& extents, void* stream) {
    if (extents.items == 0) return;
    int64_t tokens = box_tokens(of.pages);
    Params params{params_over(of, extents),
                  map_of(boxed_pages(of, extents, of.pages.k, tokens)),
                  map_of(boxed_pages(of, extents, of.pages.v, tokens)),
                  map_of(boxed_pages(of, extents, of.pages.v, TILE)),
                  static_cast<int32_t>(tokens)};
    bool is_narrow = extents.head_dim == 64;
    auto bf16 = is_narrow ? launch_for<Bf16, 64> : launch_for<Bf16, 128>;
    auto fp16 = is_narrow ? launch_for<Fp16, 64> : launch_for<Fp16, 128>;
    (extents.dtype == BF16 ? bf16 : fp16)(params, stream);
}

void run(const prefill::ParamsOver<BytePages>& of, const Extents& extents, void* stream) {
    if (extents.items == 0) return;
    prefill_wgmma_quantized::launch_stored(extents.dtype == BF16, extents.stored, extents.head_dim,
                                           params_over(of, extents), stream);
}

}  // namespace wr::prefill_wgmma
