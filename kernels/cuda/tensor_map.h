// The host's half of `bulk.cuh`: a tensor described to the copy engine.
#pragma once

#include <string>

#include "abi.h"
#include "bulk.cuh"

#ifdef __CUDACC__
#include <cudaTypedefs.h>
#endif

namespace wr {

// 16-bit elements, the first dimension dense; boxes of ROW_ELEMENTS of it.
struct Boxed {
    const void* data;
    int64_t sizes[MAP_DIMS], strides[MAP_DIMS];  // elements
    int64_t box[MAP_DIMS];
    int32_t dtype;

    int64_t stride_bytes(int d) const { return (sizes[d] == 1 ? ROW_ELEMENTS : strides[d]) * 2; }
};

// Why the copy engine cannot take it ("cuTensorMapEncodeTiled" of the CUDA driver API); empty where
// it can.
inline std::string unboxable(const Boxed& of) {
    if (reinterpret_cast<uintptr_t>(of.data) % 16) return "does not begin at 16 bytes";
    for (int d = 0; d < MAP_DIMS; d++) {
        if (of.sizes[d] < 1 || of.sizes[d] > int64_t{1} << 32) return "has none or above 2^32";
        if (of.box[d] < 1 || of.box[d] > 256) return "needs boxes of more than 256";
        int64_t bytes = of.stride_bytes(d);
        if (d > 0 && (bytes % 16 || bytes < 16 || bytes >= int64_t{1} << 40))
            return "has strides that are no multiples of 16 bytes, or beyond 2^40";
    }
    return "";
}

#ifdef __CUDACC__

// The driver's function, by the runtime: so the library needs no libcuda to be loaded.
inline PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &status),
               "cuTensorMapEncodeTiled");
    if (status != cudaDriverEntryPointSuccess || found == nullptr)
        throw LaunchError{"cuTensorMapEncodeTiled: the driver does not have it, 12.0 and later do"};
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

inline TensorMap map_of(const Boxed& of) {
    static const auto encode = map_encoder();
    cuuint64_t sizes[MAP_DIMS], strides[MAP_DIMS - 1];
    cuuint32_t box[MAP_DIMS], each[MAP_DIMS];
    for (int d = 0; d < MAP_DIMS; d++) {
        sizes[d] = static_cast<cuuint64_t>(of.sizes[d]);
        if (d > 0) strides[d - 1] = static_cast<cuuint64_t>(of.stride_bytes(d));
        box[d] = static_cast<cuuint32_t>(of.box[d]);
        each[d] = 1;
    }
    auto type = of.dtype == BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    TensorMap made;
    CUresult result = encode(&made, type, MAP_DIMS, const_cast<void*>(of.data), sizes, strides, box,
                             each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw LaunchError{"cuTensorMapEncodeTiled: error " + std::to_string(result)};
    return made;
}

#else

inline TensorMap map_of(const Boxed& of) {
    TensorMap made{static_cast<const char*>(of.data), {}, {}, {}};
    for (int d = 0; d < MAP_DIMS; d++) {
        made.sizes[d] = of.sizes[d];
        made.bytes[d] = d ? of.stride_bytes(d) : 2;
        made.box[d] = static_cast<int>(of.box[d]);
    }
    return made;
}

#endif

}  // namespace wr
