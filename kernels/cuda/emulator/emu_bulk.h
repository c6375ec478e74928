// Phase barriers and box copies of `bulk.cuh`, modelled.
//
// A box lands when it is issued or at any time until nobody else can go on, drawn from the seed.
// Its rows may be read by threads that have waited for the phase of its barrier; earlier reads are
// named, as are copies over what others read or products are reading, rows that ordinary stores
// wrote without `fence_async`, barriers that were not made or not told of, and copies that nobody
// waited for when the CTA ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace wr::emu {

constexpr int MAP_DIMS = 4;

// What of a CUtensorMap the emulator knows: 16-bit elements, boxes with rows of 128 bytes, 128B
// swizzle, zeros beyond the tensor.
struct TensorMap {
    const char* data;
    int64_t sizes[MAP_DIMS];  // elements
    int64_t bytes[MAP_DIMS];  // from one to the next; of an element the first
    int box[MAP_DIMS];
};

void init_mbarrier(uint64_t* barrier, int arrivals);
void arrive(uint64_t* barrier, int announced_bytes);
void wait_phase(uint64_t* barrier, int parity);
void fence_async();
void copy_box(const TensorMap& map, void* to, uint64_t* barrier, std::array<int, MAP_DIMS> first);

}  // namespace wr::emu
