// Intrinsics of the kernels, a line each: PTX under nvcc, the emulator (emu.h) under g++.
//
// A CTA is what CUDA calls a block: here a block holds tokens. Fragment layouts of `mma`: lane
// l = 4 * g + t holds of A (16 x 16) the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8),
// of B (16 x 8) the pairs of rows 2t and 2t + 8 in column g, of C (16 x 8) (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1). PTX ISA 8.8, "mma.m16n8k16".
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers.h"

#ifdef __CUDACC__
#define WR_DEV __device__ __forceinline__
#define WR_KERNEL(threads, ctas_per_sm) __global__ void __launch_bounds__(threads, ctas_per_sm)
#define WR_PARAMS const __grid_constant__
#define WR_UNROLL _Pragma("unroll")
#define WR_PRAGMA(text) _Pragma(#text)
#define WR_UNROLL_BY(count) WR_PRAGMA(unroll count)
#else
#include <cmath>
#include <cstring>

#include "emulator/emu.h"
#define WR_DEV inline
#define WR_KERNEL(threads, ctas_per_sm) inline void
#define WR_PARAMS const
#define WR_UNROLL
#define WR_UNROLL_BY(count)
#endif

namespace wr {

// Vectors by size, of 32-bit words: what one lane loads or stores at once.
struct alignas(8) Words2 {
    uint32_t w[2];
};
struct alignas(16) Words4 {
    uint32_t w[4];
};

struct Bf16 {
    static constexpr bool IS_BF16 = true;
};
struct Fp16 {
    static constexpr bool IS_BF16 = false;
};

#ifdef __CUDACC__

WR_DEV unsigned thread() { return threadIdx.x; }
WR_DEV unsigned cta_x() { return blockIdx.x; }
WR_DEV unsigned cta_y() { return blockIdx.y; }
WR_DEV char* shared() {
    extern __shared__ __align__(1024) char bytes[];
    return bytes;
}
WR_DEV void sync_cta() { __syncthreads(); }
WR_DEV void sync_warp() { __syncwarp(); }

// Programmatic dependent launch (`launch` of `abi.h`). A dependent grid may begin once each CTA has
// executed this, or has ended; without it, once all have ended.
WR_DEV void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Until the grid before has ended and its writes can be seen: nothing else makes them visible.
WR_DEV void wait_prerequisite_grids() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class T>
WR_DEV T load(const T* address) {
    return *address;
}
template <class T>
WR_DEV void store(T* address, T value) {
    *address = value;
}
// Through the read-only path: for what no thread of this launch writes.
WR_DEV Words4 load_once(const Words4* address) {
    Words4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(address));
    return v;
}
template <class T>
WR_DEV T load_shared(const T* address) {
    return *address;
}
template <class T>
WR_DEV void store_shared(T* address, T value) {
    *address = value;
}

WR_DEV uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
WR_DEV void copy_async(void* to, const void* from, bool keep) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(keep ? 16 : 0)
                 : "memory");
}
WR_DEV void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS_LEFT>
WR_DEV void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}

WR_DEV void load_matrices(uint32_t (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
WR_DEV void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
WR_DEV uint32_t transpose(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}
template <class T>
WR_DEV void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (T::IS_BF16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

WR_DEV uint32_t shfl(uint32_t v, unsigned lane) { return __shfl_sync(~0u, v, lane); }

template <class T>
WR_DEV uint32_t pack(float low, float high) {
    uint32_t out;
    if constexpr (T::IS_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// (word & MASK) | bits in one instruction: compilers make two where both are constants.
template <uint32_t MASK>
WR_DEV uint32_t masked_or(uint32_t word, uint32_t bits) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "n"(MASK), "r"(bits));
    return out;
}
// a * b + c of both halves, rounded once, subnormals kept.
template <class T>
WR_DEV uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    if constexpr (T::IS_BF16)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
template <class T>
WR_DEV float unpack(uint16_t bits) {
    if constexpr (T::IS_BF16) return from_bf16(bits);
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}
WR_DEV uint16_t pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
    return out;
#else
    return static_cast<uint16_t>(to_e4m3(low) | to_e4m3(high) << 8);
#endif
}
WR_DEV float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
WR_DEV float log2_fast(float x) { return __log2f(x); }
WR_DEV float inverse_sqrt(float x) { return rsqrtf(x); }
WR_DEV float larger(float a, float b) { return fmaxf(a, b); }
WR_DEV float smaller(float a, float b) { return fminf(a, b); }
WR_DEV float nearest(float x) { return rintf(x); }

#else  // the emulator

inline unsigned thread() { return emu::thread_index(); }
inline unsigned cta_x() { return emu::cta_index().x; }
inline unsigned cta_y() { return emu::cta_index().y; }
inline char* shared() { return emu::shared_memory(); }
inline void sync_cta() { emu::sync_cta(); }
inline void sync_warp() { emu::sync_warp(); }
inline void launch_dependent_grids() {}  // a grid is over here before the next one begins
inline void wait_prerequisite_grids() { emu::wait_prerequisite_grids(); }

template <class T>
inline T load(const T* address) {
    emu::check_global(address, sizeof(T), "a load");
    return *address;
}
template <class T>
inline void store(T* address, T value) {
    emu::write_global(address, sizeof(T));
    *address = value;
}
inline Words4 load_once(const Words4* address) { return load(address); }
template <class T>
inline T load_shared(const T* address) {
    emu::read_shared(address, sizeof(T));
    return *address;
}
template <class T>
inline void store_shared(T* address, T value) {
    emu::write_shared(address, sizeof(T));
    *address = value;
}
inline void copy_async(void* to, const void* from, bool keep) { emu::copy_async(to, from, keep); }
inline void commit_async() { emu::commit_async(); }
template <int GROUPS_LEFT>
inline void wait_async() {
    emu::wait_async(GROUPS_LEFT);
}

inline void load_matrices(uint32_t (&m)[4], const void* row) {
    emu::read_shared_row(row);
    emu::MatricesIn in{row, false};
    emu::meet_warp("load_matrices", emu::load_matrices, &in, m);
}
inline void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
    emu::read_shared_row(row);
    emu::MatricesIn in{row, true};
    emu::meet_warp("load_matrices_transposed", emu::load_matrices, &in, m);
}
inline uint32_t transpose(uint32_t pair) {
    uint32_t out;
    emu::meet_warp("transpose", emu::transpose, &pair, &out);
    return out;
}
template <class T>
inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    float out[4];
    emu::MultiplyIn in{c, a, b, T::IS_BF16};
    emu::meet_warp("mma", emu::multiply, &in, out);
    memcpy(c, out, sizeof out);
}
inline uint32_t shfl(uint32_t v, unsigned lane) {
    uint32_t out;
    emu::ShuffleIn in{v, lane};
    emu::meet_warp("shfl", emu::shuffle, &in, &out);
    return out;
}
template <class T>
inline uint32_t pack(float low, float high) {
    if constexpr (T::IS_BF16) return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
    return to_fp16(low) | static_cast<uint32_t>(to_fp16(high)) << 16;
}
template <class T>
inline float unpack(uint16_t bits) {
    return T::IS_BF16 ? from_bf16(bits) : from_fp16(bits);
}
template <uint32_t MASK>
inline uint32_t masked_or(uint32_t word, uint32_t bits) {
    return (word & MASK) | bits;
}
template <class T>
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    auto half = [&](int shift) {
        auto value = [shift](uint32_t x) { return unpack<T>(static_cast<uint16_t>(x >> shift)); };
        return value(a) * value(b) + value(c);
    };
    return pack<T>(half(0), half(16));
}
inline uint16_t pack_e4m3(float low, float high) {
    return static_cast<uint16_t>(to_e4m3(low) | to_e4m3(high) << 8);
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float inverse_sqrt(float x) { return 1 / std::sqrt(x); }
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float smaller(float a, float b) { return std::fmin(a, b); }
inline float nearest(float x) { return std::nearbyint(x); }

#endif

WR_DEV unsigned lane() { return thread() % 32; }
WR_DEV unsigned warp() { return thread() / 32; }
WR_DEV float shfl(float v, unsigned lane) { return float_of(shfl(bits_of(v), lane)); }
WR_DEV int64_t shfl(int64_t v, unsigned lane) {
    uint64_t low = shfl(static_cast<uint32_t>(v), lane);
    uint64_t high = shfl(static_cast<uint32_t>(v >> 32), lane);
    return static_cast<int64_t>(high << 32 | low);
}
WR_DEV float shfl_xor(float v, unsigned mask) { return shfl(v, lane() ^ mask); }
template <class T>
WR_DEV float low(uint32_t pair) {
    return unpack<T>(static_cast<uint16_t>(pair));
}
template <class T>
WR_DEV float high(uint32_t pair) {
    return unpack<T>(static_cast<uint16_t>(pair >> 16));
}

}  // namespace wr
