// Boxes of a tensor brought to shared memory by the copy engine, and the barriers that tell when
// they are there: one-line words as in `dev.cuh`, for sm_90 (PTX ISA 9.0, "mbarrier" and
// "cp.async.bulk.tensor"), modelled in `emu_bulk.h`.
//
// An mbarrier counts arrivals and bytes: its phase ends when as many threads have arrived as it was
// made for and all bytes that were announced have landed. Phases are told apart by parity; one that
// has not begun counts as ended for parity 1, so that whoever waits for an empty stage begins with
// parity 1.
//
// A box is one TMA tile of a tensor map (its `boxDim`).
//
// Rows of a box are 128 bytes. Row r of a 1024-byte atom has its 16-byte chunk c at c ^ r
// ("128B swizzle"), which is what the tensor cores read (`wgmma.cuh`).
#pragma once

#include "dev.cuh"

#ifdef __CUDACC__
#include <cuda.h>
#else
#include "emulator/emu_bulk.h"
#endif

namespace wr {

constexpr int ROW_BYTES = 128, ROW_ELEMENTS = 64, ATOM_BYTES = 8 * ROW_BYTES;
constexpr int MAP_DIMS = 4;

using Mbarrier = uint64_t;  // in shared memory

#ifdef __CUDACC__

using TensorMap = CUtensorMap;

WR_DEV void init_mbarrier(Mbarrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
WR_DEV void arrive(Mbarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
// Announces `bytes` of copies for this phase, then arrives.
WR_DEV void arrive_expecting(Mbarrier* barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
WR_DEV void wait_phase(Mbarrier* barrier, int parity) {
    uint32_t is_over = 0;
#ifdef WR_SPIN_LIMIT  // a hang becomes a failed launch
    for (int64_t spins = 0; !is_over; spins++) {
        if (spins == WR_SPIN_LIMIT) asm volatile("trap;");
#else
    while (!is_over) {
#endif
        asm volatile(
            "{\n.reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n}"
            : "=r"(is_over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}
// What this thread has done to shared memory by ordinary stores (or to a new barrier) comes before
// what the copy engine and the tensor cores do to it after the next barrier.
WR_DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One box from coordinates (dim, ...) on; zeros beyond the tensor. Called by one thread.
WR_DEV void copy_box(const TensorMap& map, void* to, Mbarrier* barrier, int c0, int c1, int c2,
                     int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
WR_DEV void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#else  // the emulator

using TensorMap = emu::TensorMap;

inline void init_mbarrier(Mbarrier* barrier, int arrivals) {
    emu::init_mbarrier(barrier, arrivals);
}
inline void arrive(Mbarrier* barrier) { emu::arrive(barrier, 0); }
inline void arrive_expecting(Mbarrier* barrier, int bytes) { emu::arrive(barrier, bytes); }
inline void wait_phase(Mbarrier* barrier, int parity) { emu::wait_phase(barrier, parity); }
inline void fence_async() { emu::fence_async(); }
inline void copy_box(const TensorMap& map, void* to, Mbarrier* barrier, int c0, int c1, int c2,
                     int c3) {
    emu::copy_box(map, to, barrier, {c0, c1, c2, c3});
}
inline void prefetch_map(const TensorMap&) {}

#endif

// Where 16-byte chunk `chunk` of row `row` lies in a tile of rows of more than 128 bytes, which
// boxes bring as columns of `rows` rows, one after the other.
WR_DEV char* at_swizzled(char* tile, int rows, int row, int chunk) {
    constexpr int CHUNKS = ROW_BYTES / 16;
    return tile + (chunk / CHUNKS * rows + row) * ROW_BYTES + ((chunk ^ row) % CHUNKS) * 16;
}

// Stages in shared memory that producers fill and consumers empty, one after the other. Both count
// their uses from 0 on; a use has the stage of its number modulo COUNT.
template <int COUNT>
struct Pipeline {
    char* first;
    int bytes;                    // of one stage
    Mbarrier *full, *empty;  // [COUNT]

    WR_DEV char* at(int use) const { return first + use % COUNT * bytes; }
    WR_DEV Mbarrier* full_barrier(int use) const { return full + use % COUNT; }
    WR_DEV void wait_empty(int use) const {
        wait_phase(empty + use % COUNT, (use / COUNT + 1) % 2);
    }
    WR_DEV void wait_full(int use) const { wait_phase(full + use % COUNT, use / COUNT % 2); }
    // For all lanes of a warp that has read what it wanted; one arrives.
    WR_DEV void release(int use) const {
        sync_warp();
        if (lane() == 0) arrive(empty + use % COUNT);
    }
    WR_DEV void init(int producers, int consumers) const {
        for (int n = 0; n < COUNT; n++) {
            init_mbarrier(full + n, producers);
            init_mbarrier(empty + n, consumers);
        }
    }
};

}  // namespace wr
