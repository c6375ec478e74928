// Launches Hopper's prefill over quantized pages: instances of their own, so that they compile
// beside others.

#include "prefill/prefill_wgmma_quantized.cuh"

#include "abi.h"

namespace wr::prefill_wgmma_quantized {
namespace {

template <class T, class Stored, int D>
void launch_for(const Params& params, void* stream) {
    launch(kernel<T, Stored, D>, "prefill_wgmma", params.ctas, 1, THREADS,
           SHARED_BYTES<D> + MORE_BYTES, stream, params);
}

template <class T, class Stored>
void launch_for(int64_t head_dim, const Params& params, void* stream) {
    auto one = head_dim == 64 ? launch_for<T, Stored, 64> : launch_for<T, Stored, 128>;
    one(params, stream);
}

}  // namespace

void launch_stored(bool is_bf16, int32_t stored, int64_t head_dim, const Params& params,
                   void* stream) {
    auto bf16 = stored == I8 ? launch_for<Bf16, Int8> : launch_for<Bf16, E4m3>;
    auto fp16 = stored == I8 ? launch_for<Fp16, Int8> : launch_for<Fp16, E4m3>;
    (is_bf16 ? bf16 : fp16)(head_dim, params, stream);
}

}  // namespace wr::prefill_wgmma_quantized
