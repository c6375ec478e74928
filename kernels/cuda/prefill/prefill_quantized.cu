// Launches prefill over quantized pages: instances of their own, so that they compile beside
// others.

#include "prefill/prefill_quantized.cuh"

#include "abi.h"

namespace wr::prefill_quantized {
namespace {

template <class T, class Stored, int D>
void launch_for(int64_t items, const ParamsOver<BytePages>& params, void* stream) {
    using Keys = WidenedKeys<T, Stored, D>;
    // Two CTAs share an SM of Hopper, whose driver takes 1 KiB of each.
    static_assert(2 * (SHARED_BYTES<Keys> + 1024) <= 228 * 1024);
    auto run = params.is_cut ? kernel<T, Stored, D, true> : kernel<T, Stored, D, false>;
    launch(run, "prefill", items * params.kv_heads, 1, THREADS,
           SHARED_BYTES<Keys>, stream, params);
}

template <class T, class Stored>
void launch_for(int64_t head_dim, int64_t items, const ParamsOver<BytePages>& params,
                void* stream) {
    auto one = head_dim == 64 ? launch_for<T, Stored, 64> : launch_for<T, Stored, 128>;
    one(items, params, stream);
}

}  // namespace

void launch_stored(bool is_bf16, int32_t stored, int64_t head_dim, int64_t items,
                const ParamsOver<BytePages>& params, void* stream) {
    auto bf16 = stored == I8 ? launch_for<Bf16, Int8> : launch_for<Bf16, E4m3>;
    auto fp16 = stored == I8 ? launch_for<Fp16, Int8> : launch_for<Fp16, E4m3>;
    (is_bf16 ? bf16 : fp16)(head_dim, items, params, stream);
}

}  // namespace wr::prefill_quantized
