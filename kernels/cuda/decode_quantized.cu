// Launches decode over quantized pages: instances of their own, so that they compile beside others.

#include "decode_quantized.cuh"

#include "abi.h"

namespace wr::decode_quantized {
namespace {

template <class T, class Stored, int D>
void launch_for(int64_t items, const ParamsOver<BytePages>& params, void* stream) {
    int64_t kv_heads = params.heads / params.group;
    auto one = params.group <= 8 ? kernel<T, Stored, D, 1> : kernel<T, Stored, D, 2>;
    launch(one, "decode", items, kv_heads, THREADS, SHARED_BYTES<ByteTiles<T, Stored, D>>,
           stream, params);
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

}  // namespace wr::decode_quantized
