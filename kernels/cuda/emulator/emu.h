// A CUDA grid on one CPU thread, so that device code is tested where there is no GPU.
//
// Every thread of a CTA is a fiber. Fibers run until they meet others: at a warp operation (all 32
// lanes) or at the CTA's barrier. Who runs next is drawn from a seed, so that code which only works
// in one order fails for some seed. Shared memory starts as 0xFF bytes (NaN in every float type).
// Memory is checked: global addresses against the tensors of the launch, shared ones against the
// CTA's, all of them for alignment. An asynchronous copy lands when it is issued or when it is
// waited for, by chance: hardware may do either, and correct code cannot tell. Reading what another
// thread put into shared memory, or writing over what another reads, with no barrier since, is
// named (emu_writes.h). Hopper's copy engine and warpgroup products: emu_bulk.h, emu_products.h.
// Before it has waited for the grid before, a thread of a dependent launch may not load from a
// tensor that the launches before have stored to, store anything, or end.
//
// What it cannot see: memory ordering between CTAs, bank conflicts, time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wr::emu {

struct Index {
    unsigned x, y;
};

unsigned thread_index();
Index cta_index();
char* shared_memory();

// All 32 lanes meet; the last one calls `run` with everybody's `in` and `out`. Lanes that meet at
// operations of different names are a divergence, which ends the launch.
using WarpOperation = void (*)(const void* const* in, void* const* out);
void meet_warp(const char* name, WarpOperation run, const void* in, void* out);
void sync_warp();
void sync_cta();

// End the launch with this message if `bytes` at `address` may not be touched or are unaligned.
void check_global(const void* address, size_t bytes, const char* what);
void write_global(const void* address, size_t bytes);
void read_shared(const void* address, size_t bytes);
void write_shared(void* address, size_t bytes);
// A row of 16 bytes that is read for all lanes of the warp.
void read_shared_row(const void* row);

// 16 bytes, or zeros where not `keep`: the source is not read then.
void copy_async(void* shared, const void* global, bool keep);
void commit_async();
void wait_async(int groups_left);

void wait_prerequisite_grids();

// The arithmetic of warp operations (emu_warp.cpp).
void shuffle(const void* const* in, void* const* out);
void load_matrices(const void* const* in, void* const* out);
void transpose(const void* const* in, void* const* out);
void multiply(const void* const* in, void* const* out);

struct ShuffleIn {
    uint32_t bits;
    unsigned from;
};

struct MatricesIn {
    const void* row;  // of 8 values of 16 bits; lane 8 * m + r has row r of matrix m
    bool transposed;
};

struct MultiplyIn {
    const float* c;     // 4, of 16 x 8
    const uint32_t* a;  // 4, of 16 x 16
    const uint32_t* b;  // 2, of 16 x 8
    bool is_bf16;
};

// Host side. `grant` lets launches touch these bytes until `revoke`, which ends a call.
void grant(const void* begin, size_t bytes);
void revoke();

using Kernel = void (*)(const void* params);
// Runs all CTAs; null, or what went wrong (valid until the next launch of this host thread).
const char* launch(Kernel kernel, const void* params, Index grid, unsigned threads, size_t shared,
                   bool is_dependent);

}  // namespace wr::emu

extern "C" void wr_emulator_seed(uint64_t seed);
