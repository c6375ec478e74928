// The host side of every kernel: tensors as plain C describes them, refusals by name, launches
// whose errors are checked. Framework-free: the caller is `kvkernels/cuda/library.py`.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "emulator/emu.h"
#endif

#define WR_EXPORT extern "C" __attribute__((visibility("default")))

namespace wr {

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, E4M3 = 4, I32 = 5, I64 = 6 };

constexpr int MAX_DIMS = 5;

}  // namespace wr

// A view of somebody's memory; strides count elements. Lifetime: the call it is passed to.
struct wr_tensor {
    void* data;
    int64_t shape[wr::MAX_DIMS];
    int64_t stride[wr::MAX_DIMS];
    int32_t dims;
    int32_t dtype;    // a Dtype
    int32_t on_cuda;  // 1: device memory, 0: the host's
    int32_t reserved;
};

namespace wr {

// What a caller can mend. Its text begins with the name of what is wrong.
struct Refusal {
    std::string text;
};

// A kernel could not be launched, or an earlier one on this device failed.
struct LaunchError {
    std::string text;
};

constexpr int OK = 0, REFUSED = 1, FAILED = 2;
int keep_error(int code, const std::string& text);

// Every entry point is `return guarded([&] { ... });`: no exception crosses the C boundary.
template <class Body>
int guarded(Body body) {
    int code;
    try {
        body();
        code = OK;
    } catch (const Refusal& refusal) {
        code = keep_error(REFUSED, refusal.text);
    } catch (const LaunchError& error) {
        code = keep_error(FAILED, error.text);
    }
#ifndef __CUDACC__
    emu::revoke();
#endif
    return code;
}

void need(bool fits, const char* name, const std::string& what);

// Checks `tensor` and gives its data: not null unless empty, of `dtypes`, of `shape` (-1: any size,
// which is then at least 1), on the device this build computes on. Any strides but negative ones.
// Under the emulator, the launch that follows may touch it.
void* need_tensor(const wr_tensor* tensor, const char* name, std::initializer_list<int32_t> dtypes,
                  std::initializer_list<int64_t> shape);

void need_dense_rows(const wr_tensor* tensor, const char* name);

// Dense rows that are accessed 16 bytes at a time: base, strides and length are multiples of that.
void need_rows_of_16_bytes(const wr_tensor* tensor, const char* name);

int64_t element_bytes(int32_t dtype);

// Of the current device, for grids that stay; a small number in the emulator.
int64_t multiprocessors();

// Whether the current device has compute capability 9.0; not in the emulator.
bool is_hopper();

// Bytes of shared memory that a CTA of the current device can have; in the emulator a Hopper's, or
// what `wr_emulator_shared_limit` was told.
int64_t shared_limit();

constexpr int64_t MAX_GRID_X = 0x7FFFFFFF, MAX_GRID_Y = 65535;

#ifdef __CUDACC__
inline void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess)
        throw LaunchError{std::string(what) + ": " + cudaGetErrorString(error)};
}
#endif

// Launches `kernel` on `stream` (a cudaStream_t). A grid of no CTAs is no launch.
//
// A dependent kernel begins while the launch before it, one of the same call, ends (programmatic
// dependent launch; in a CUDA graph, a programmatic edge). Each of its threads calls
// `wait_prerequisite_grids` before it reads what that launch writes, before it writes anything and
// before it ends: so whatever comes next finds both at their ends. An ordinary launch on devices
// other than of compute capability 9.0: these run code that is made for 8.0, which cannot wait.
template <class Params>
void launch(void (*kernel)(Params), const char* name, int64_t grid_x, int64_t grid_y, int threads,
            int64_t shared_bytes, void* stream, const Params& params, bool is_dependent = false) {
    need(grid_x <= MAX_GRID_X && grid_y <= MAX_GRID_Y, name, "needs a larger grid than there is");
    if (grid_x == 0 || grid_y == 0) return;
    need(shared_bytes <= (48 << 10) || shared_bytes <= shared_limit(), name,
         "needs " + std::to_string(shared_bytes) + " bytes of shared memory, the device has " +
             std::to_string(shared_limit()));
#ifdef __CUDACC__
    if (shared_bytes > (48 << 10))  // a setting of the function, legal while a graph is captured
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)),
                   name);
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = is_dependent && is_hopper() ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
#else
    (void)stream;
    struct Call {
        void (*kernel)(Params);
        const Params* params;
    } call{kernel, &params};
    auto run = [](const void* at) {
        auto own = static_cast<const Call*>(at);
        own->kernel(*own->params);
    };
    emu::Index grid{static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y)};
    const char* error = emu::launch(run, &call, grid, static_cast<unsigned>(threads),
                                    static_cast<size_t>(shared_bytes), is_dependent);
    if (error) throw LaunchError{std::string(name) + ": " + error};
#endif
}

}  // namespace wr
