// Launches shared decode over quantized pages: instances of their own, so that they compile beside
// others.

#include "decode/shared_decode_quantized.cuh"

#include "abi.h"

namespace wr::shared_decode_quantized {
namespace {

template <class T, class Stored, int D>
void launch_for(const ParamsOver<BytePages>& params, void* stream) {
    constexpr int BYTES = SHARED_BYTES<Few<T, Stored, D>, Many<T, Stored, D>>;
    launch(kernel<T, Stored, D>, "shared_decode", params.ctas, params.heads / params.group,
           THREADS, BYTES, stream, params);
}

template <class T, class Stored>
void launch_for(int64_t head_dim, const ParamsOver<BytePages>& params, void* stream) {
    auto one = head_dim == 64 ? launch_for<T, Stored, 64> : launch_for<T, Stored, 128>;
    one(params, stream);
}

}  // namespace

void launch_stored(bool is_bf16, int32_t stored, int64_t head_dim,
                   const ParamsOver<BytePages>& params, void* stream) {
    auto bf16 = stored == I8 ? launch_for<Bf16, Int8> : launch_for<Bf16, E4m3>;
    auto fp16 = stored == I8 ? launch_for<Fp16, Int8> : launch_for<Fp16, E4m3>;
    (is_bf16 ? bf16 : fp16)(head_dim, params, stream);
}

}  // namespace wr::shared_decode_quantized
