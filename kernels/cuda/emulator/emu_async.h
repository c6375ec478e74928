// The part of the emulator's state that belongs to asynchronous work: `emu_bulk.cpp` and
// `emu_products.cpp`. Lifetime: a CTA.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "emulator/emu_bulk.h"
#include "emulator/emu_products.h"
#include "emulator/emu_writes.h"

namespace wr::emu {

constexpr size_t LINE_BYTES = 128;  // a row of a box
constexpr unsigned GROUP_LANES = 128, GROUP_WARPS = 4;

struct Phases {
    std::string name;
    int64_t arrivals = 0, missing = 0, bytes = 0;
    uint32_t over = 0;           // phases
    uint32_t copies_until = 0;   // phases, the last of which has copies
    Times told;                  // by those that arrived in this phase
    Times heard;                 // by those that wait for phases that are over
    std::vector<uint32_t> seen;  // phases that each thread has waited for
    struct Waiter {
        unsigned thread;
        int parity;
    };
    std::vector<Waiter> waiting;
};

struct Box {
    TensorMap map;
    char* to;
    Phases* phases;
    std::array<int, MAP_DIMS> first;
    int64_t bytes;
};

struct Line {  // whose phase must be over before it is read; null: none
    Phases* phases = nullptr;
    uint32_t phase = 0;
};

struct Product {
    std::vector<ProductIn> of;                 // each thread's
    std::vector<std::array<uint32_t, 4>> a;    // what it was
    std::vector<size_t> atoms;                 // offsets of what it reads
    uint32_t group = 0;
    bool is_done = false;
};

struct Warpgroup {
    const void* in[GROUP_LANES];
    unsigned arrived = 0;
    const char* name = nullptr;
    bool has_begun[GROUP_WARPS] = {};
    uint32_t committed = 0;            // groups
    uint32_t waited[GROUP_WARPS] = {};  // groups
    std::vector<Product> flight;       // in order
    std::map<float*, std::vector<float>> sums;  // by thread 0's accumulators, thread by thread
};

struct Async {
    std::map<size_t, Phases> phases;  // by offset
    std::vector<Box> in_air;
    std::vector<Line> lines;
    std::vector<Warpgroup> groups;

    void reset(size_t bytes, unsigned threads) {
        phases.clear();
        in_air.clear();
        lines.assign((bytes + LINE_BYTES - 1) / LINE_BYTES, {});
        groups.assign((threads + GROUP_LANES - 1) / GROUP_LANES, {});
    }
};

// A box that is in the air lands, whichever; false if none is.
bool land_any();
// What `reader` may not read yet of these bytes, since a copy brings them; else null.
const char* not_yet_there(unsigned reader, size_t offset, size_t bytes);
// Whether a product in flight reads any of these bytes.
bool is_multiplied(size_t offset, size_t bytes);
// These threads have met: what one has waited for, all have.
void see_alike(unsigned first_thread, unsigned count);
// A thread is about to store there: no copy may be on its way; the lines are no copy's any more.
void claim_lines(size_t offset, size_t bytes);
// Null, or what was left in flight by a CTA that ended.
const char* left_behind();

}  // namespace wr::emu
