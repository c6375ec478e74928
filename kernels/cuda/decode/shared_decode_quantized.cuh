// Shared decode over quantized pages: decode's way of bytes where few rows share, prefill's where
// many do.
#pragma once

#include "decode/decode_quantized.cuh"
#include "decode/shared_decode.cuh"
#include "prefill/prefill_quantized.cuh"

namespace wr::shared_decode_quantized {

using namespace shared_decode;

// Host side: checked arguments, `stored` an 8-bit Dtype of `abi.h`.
void launch_stored(bool is_bf16, int32_t stored, int64_t head_dim,
                   const ParamsOver<BytePages>& params, void* stream);

template <class T, class Stored, int D>
using Few = decode_quantized::ByteTiles<T, Stored, D>;
template <class T, class Stored, int D>
using Many = prefill_quantized::WidenedKeys<T, Stored, D>;

template <class T, class Stored, int D>
WR_KERNEL(THREADS, 2) kernel(WR_PARAMS ParamsOver<BytePages> p) {
    run<Few<T, Stored, D>, Many<T, Stored, D>>(p);
}

}  // namespace wr::shared_decode_quantized
