// Products of a warpgroup (four warps) on Hopper's tensor cores, asynchronous, with operands in
// shared memory: one-line words as in `dev.cuh`, for sm_90a (PTX ISA 9.0, "Asynchronous
// Warpgroup Level Matrix Multiply-Accumulate Instructions"), modelled in `emu_products.h`.
//
// 64 rows times N columns, 16 deep. Lane l = 4 * g + t of warp w of the group has the rows
// 16 w + g and 16 w + g + 8 as one `mma` has them, N / 8 times side by side: c[4 * n + i].
//
// In order: `begin_products` (accumulators and operands in registers are as they shall be),
// products, `commit_products`, `wait_products<N>` (all groups but the last N are done). Until then
// nobody touches the accumulators or the operands. Both calls are given all registers, those of
// left operands too, or the compiler may write to them earlier; they are usable after the wait.
#pragma once

#include <type_traits>

#include "bulk.cuh"

#ifndef __CUDACC__
#include "emulator/emu_products.h"
#endif

namespace wr {

constexpr int WARPGROUP = 128;  // threads

// By a shuffle, from which the compiler knows it to be the same in all lanes: descriptors made of
// it can then stay in uniform registers.
WR_DEV int warpgroup() { return static_cast<int>(shfl(thread() / WARPGROUP, 0)); }

namespace wgmma {

// A "matrix descriptor": address and offsets in units of 16 bytes; bit 62 says 128B swizzle.
WR_DEV uint64_t operand(uint32_t address, uint32_t leading_bytes) {
    uint64_t stride = ATOM_BYTES / 16, leading = leading_bytes / 16;
    return uint64_t{1} << 62 | stride << 32 | leading << 16 | (address & 0x3FFFF) >> 4;
}

}  // namespace wgmma

#ifdef __CUDACC__

// An operand in shared memory, as boxes bring it. `deep`: rows lie along the depth, eight of them
// an atom; `tile` may begin at any 32 bytes of an atom's first row.
WR_DEV uint64_t deep_operand(const char* tile) { return wgmma::operand(shared_address(tile), 16); }
// `wide`: rows lie along the columns; `next_bytes` from the first 64 are the next ones.
WR_DEV uint64_t wide_operand(const char* tile, int next_bytes) {
    return wgmma::operand(shared_address(tile), next_bytes);
}

// Registers of this thread, of those that the kernel was launched with: all threads of a warpgroup
// say the same.
template <int COUNT>
WR_DEV void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
WR_DEV void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
WR_DEV void sync_warpgroup() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup()), "n"(WARPGROUP) : "memory");
}

// The compiler moves no use of these registers past this point (a fence operand).
template <class Word, int COUNT>
WR_DEV void fence_operand(Word (&registers)[COUNT]) {
    WR_UNROLL
    for (int i = 0; i < COUNT; i++)
        if constexpr (std::is_array_v<Word>)
            fence_operand(registers[i]);
        else if constexpr (std::is_same_v<Word, float>)
            asm volatile("" : "+f"(registers[i])::"memory");
        else
            asm volatile("" : "+r"(registers[i])::"memory");
}
template <class... Registers>
WR_DEV void begin_products(Registers&... registers) {
    (fence_operand(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
WR_DEV void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS_LEFT, class... Registers>
WR_DEV void wait_products(Registers&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS_LEFT) : "memory");
    (fence_operand(registers), ...);
}

#define WR_REGISTERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WR_REGISTERS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WR_8(c, i)                                                                             \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define WR_32(c, i) WR_8(c, i), WR_8(c, i + 8), WR_8(c, i + 16), WR_8(c, i + 24)
#define WR_64(c) WR_32(c, 0), WR_32(c, 32)
// From shared memory, both deep; `add` 0 begins a sum.
#define WR_PRODUCT(type, c, a, b, add)                                                       \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                            \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                \
                 " {" WR_REGISTERS_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"                     \
                 : WR_64(c)                                                                  \
                 : "l"(a), "l"(b), "r"(add))
// The left operand from registers, the right one wide.
#define WR_PRODUCT_64(type, c, a, b)                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                 \
                 " {" WR_REGISTERS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"            \
                 : WR_32(c, 0)                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WR_PRODUCT_128(type, c, a, b)                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                \
                 " {" WR_REGISTERS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"            \
                 : WR_64(c)                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c (+)= a b, a and b deep.
template <class T>
WR_DEV void multiply(float (&c)[64], uint64_t a, uint64_t b, bool is_first) {
    int add = is_first ? 0 : 1;
    if constexpr (T::IS_BF16)
        WR_PRODUCT("bf16", c, a, b, add);
    else
        WR_PRODUCT("f16", c, a, b, add);
}
// c += a b, a as one `mma` has it, b wide.
template <class T>
WR_DEV void multiply(float (&c)[32], const uint32_t* a, uint64_t b) {
    if constexpr (T::IS_BF16)
        WR_PRODUCT_64("bf16", c, a, b);
    else
        WR_PRODUCT_64("f16", c, a, b);
}
template <class T>
WR_DEV void multiply(float (&c)[64], const uint32_t* a, uint64_t b) {
    if constexpr (T::IS_BF16)
        WR_PRODUCT_128("bf16", c, a, b);
    else
        WR_PRODUCT_128("f16", c, a, b);
}

#else  // the emulator

inline uint64_t deep_operand(const char* tile) {
    return wgmma::operand(static_cast<uint32_t>(tile - shared()), 16);
}
inline uint64_t wide_operand(const char* tile, int next_bytes) {
    return wgmma::operand(static_cast<uint32_t>(tile - shared()),
                          static_cast<uint32_t>(next_bytes));
}
template <int COUNT>
inline void take_registers() {}
template <int COUNT>
inline void give_registers() {}
inline void sync_warpgroup() { emu::sync_warpgroup(); }

template <class... Registers>
inline void begin_products(Registers&...) {
    emu::begin_products();
}
inline void commit_products() { emu::commit_products(); }
template <int GROUPS_LEFT, class... Registers>
inline void wait_products(Registers&...) {
    emu::wait_products(GROUPS_LEFT);
}
template <class T>
inline void multiply(float (&c)[64], uint64_t a, uint64_t b, bool is_first) {
    emu::issue({c, 128, nullptr, a, b, !is_first, false, T::IS_BF16});
}
template <class T, int COUNT>
inline void multiply(float (&c)[COUNT], const uint32_t* a, uint64_t b) {
    emu::issue({c, 2 * COUNT, a, 0, b, true, true, T::IS_BF16});
}

#endif

}  // namespace wr
