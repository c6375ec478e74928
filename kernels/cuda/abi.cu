// Checks of `abi.h`, the last error, and what the library says of itself.

#include "abi.h"

#include <algorithm>
#include <vector>

namespace wr {
namespace {

thread_local std::string last_error;

constexpr struct {
    const char* name;
    int64_t bytes;
} DTYPES[] = {{"float32", 4}, {"bfloat16", 2}, {"float16", 2}, {"int8", 1},
              {"float8_e4m3fn", 1}, {"int32", 4}, {"int64", 8}};
constexpr int32_t DTYPE_COUNT = sizeof(DTYPES) / sizeof(DTYPES[0]);

std::string shape_of(const int64_t* sizes, size_t dims) {
    std::string text = "[";
    for (size_t d = 0; d < dims; d++)
        text += (d ? ", " : "") + (sizes[d] < 0 ? std::string("any") : std::to_string(sizes[d]));
    return text + "]";
}

std::string dtype_name(int32_t dtype) {
    return dtype >= 0 && dtype < DTYPE_COUNT ? DTYPES[dtype].name : "an unknown dtype";
}

}  // namespace

int keep_error(int code, const std::string& text) {
    last_error = text;
    return code;
}

void need(bool fits, const char* name, const std::string& what) {
    if (!fits) throw Refusal{std::string(name) + " " + what};
}

int64_t element_bytes(int32_t dtype) { return DTYPES[dtype].bytes; }

#ifdef __CUDACC__
namespace {

int attribute(cudaDeviceAttr name) {
    int device, value;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
}

}  // namespace

int64_t multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

int64_t shared_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

bool is_hopper() {
    return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}
#else
int64_t multiprocessors() { return 3; }

bool is_hopper() { return false; }

namespace {
int64_t emulated_limit = 227 << 10;
}
int64_t shared_limit() { return emulated_limit; }
#endif

void* need_tensor(const wr_tensor* tensor, const char* name, std::initializer_list<int32_t> dtypes,
                  std::initializer_list<int64_t> shape) {
    need(tensor != nullptr, name, "is missing");
    std::string wanted;
    for (int32_t dtype : dtypes) wanted += (wanted.empty() ? "" : " or ") + dtype_name(dtype);
    need(std::count(dtypes.begin(), dtypes.end(), tensor->dtype) > 0, name,
         "is " + dtype_name(tensor->dtype) + ", needs " + wanted);
    bool fits = tensor->dims == static_cast<int32_t>(shape.size()) && tensor->dims <= MAX_DIMS;
    for (int d = 0; fits && d < tensor->dims; d++) {
        int64_t wants = shape.begin()[d];
        fits = wants < 0 ? tensor->shape[d] >= 1 : tensor->shape[d] == wants;
    }
    need(fits, name,
         "has shape " +
             shape_of(tensor->shape, std::clamp<int>(tensor->dims, 0, MAX_DIMS)) + ", needs " +
             shape_of(shape.begin(), shape.size()));
    int64_t last = 0;
    bool is_empty = false;
    for (int d = 0; d < tensor->dims; d++) {
        int64_t step;
        need(tensor->stride[d] >= 0 &&
                 !__builtin_mul_overflow(tensor->shape[d] - 1, tensor->stride[d], &step) &&
                 !__builtin_add_overflow(last, step, &last) && last < (int64_t{1} << 58),
             name, "has negative strides, or ones beyond 2^58 elements");
        is_empty |= tensor->shape[d] == 0;
    }
    if (is_empty) return nullptr;
    int64_t bytes = element_bytes(tensor->dtype);
    need(tensor->data != nullptr, name, "has no memory");
    need(reinterpret_cast<uintptr_t>(tensor->data) % static_cast<uint64_t>(bytes) == 0, name,
         "is not aligned to its elements");
#ifdef __CUDACC__
    need(tensor->on_cuda == 1, name, "is not on a CUDA device");
#else
    need(tensor->on_cuda == 0, name, "is not in the host's memory");
    emu::grant(tensor->data, static_cast<size_t>((last + 1) * bytes));
#endif
    return tensor->data;
}

void need_dense_rows(const wr_tensor* tensor, const char* name) {
    need(tensor->stride[tensor->dims - 1] == 1 || tensor->shape[tensor->dims - 1] == 1, name,
         "is not dense in its last dimension");
}

void need_rows_of_16_bytes(const wr_tensor* tensor, const char* name) {
    need_dense_rows(tensor, name);
    int64_t bytes = element_bytes(tensor->dtype);
    bool fits = reinterpret_cast<uintptr_t>(tensor->data) % 16 == 0;
    for (int d = 0; d + 1 < tensor->dims; d++)
        fits = fits && (tensor->shape[d] == 1 || tensor->stride[d] * bytes % 16 == 0);
    need(fits && tensor->shape[tensor->dims - 1] * bytes % 16 == 0, name,
         "does not have its rows at multiples of 16 bytes");
}

}  // namespace wr

// The text of this host thread's last refusal or failure; valid until its next call.
WR_EXPORT const char* wr_last_error() { return wr::last_error.c_str(); }

#ifndef __CUDACC__
WR_EXPORT void wr_emulator_shared_limit(int64_t bytes) { wr::emulated_limit = bytes; }
#endif

// Of the current device and this library: compute capability (major * 10 + minor), SMs, bytes of
// shared memory a CTA, CUDA versions of the driver and of the library (1000 * major + 10 * minor).
WR_EXPORT int wr_device(int64_t* found) {
    return wr::guarded([&] {
#ifdef __CUDACC__
        int driver = 0;
        wr::check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
        found[3] = driver;
        found[4] = CUDART_VERSION;
        wr::need(driver / 1000 >= CUDART_VERSION / 1000, "the driver",
                 "is of CUDA " + std::to_string(driver / 1000) + ", the library needs " +
                     std::to_string(CUDART_VERSION / 1000));
        found[0] = wr::attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                   wr::attribute(cudaDevAttrComputeCapabilityMinor);
#else
        found[0] = found[3] = found[4] = 0;
#endif
        found[1] = wr::multiprocessors();
        found[2] = wr::shared_limit();
    });
}

// So that a caller compiled for another layout of `wr_tensor` notices.
WR_EXPORT int64_t wr_tensor_bytes() { return sizeof(wr_tensor); }
