// Copies of runs of bytes: blocks to and from a buffer, and between pools of other shards, block
// sizes and orders.
//
// What depends on the two layouts (the runs of one unit) and what depends on the request (which
// units go where) are apart: the host makes the first once, the second is two numbers a unit. A
// CTA copies one run of one unit. 16 bytes a lane where both ends allow it, four loads before
// their stores; the plan cuts runs to what one CTA has in flight.
#pragma once

#include "dev.cuh"

namespace wr::copy_runs {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4;

// int64 rows of three and of two.
enum RunField { SOURCE_OFFSET, TARGET_OFFSET, BYTES, RUN_FIELDS };
enum MoveField { SOURCE_BASE, TARGET_BASE, MOVE_FIELDS };

struct Params {
    const char* source;
    char* target;
    int64_t source_bytes, target_bytes;
    const int64_t *runs, *moves;
    uint32_t run_count;
};

WR_DEV Words4 fetch(const Words4* at) { return load_once(at); }
template <class Word>
WR_DEV Word fetch(const Word* at) {
    return load(at);
}

template <class Word>
WR_DEV void copy_words(const char* from, char* to, int64_t bytes) {
    int64_t count = bytes / static_cast<int64_t>(sizeof(Word));
    auto in = reinterpret_cast<const Word*>(from);
    auto out = reinterpret_cast<Word*>(to);
    for (int64_t first = thread(); first < count; first += THREADS * AT_ONCE) {
        Word words[AT_ONCE] = {};
        WR_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * THREADS < count) words[i] = fetch(in + first + i * THREADS);
        WR_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * THREADS < count) store(out + first + i * THREADS, words[i]);
    }
}

// Whether `bytes` from `first` on are within `there`, whatever the numbers are.
WR_DEV bool is_within(int64_t first, int64_t bytes, int64_t there) {
    return first >= 0 && bytes >= 0 && bytes <= there && first <= there - bytes;
}

WR_KERNEL(THREADS, 8) kernel(WR_PARAMS Params p) {
    const int64_t* move = p.moves + static_cast<int64_t>(cta_x() / p.run_count) * MOVE_FIELDS;
    const int64_t* run = p.runs + static_cast<int64_t>(cta_x() % p.run_count) * RUN_FIELDS;
    int64_t source_base = load(move + SOURCE_BASE), target_base = load(move + TARGET_BASE);
    // -1: padding. Bases beyond the ends would overflow the sums.
    if (!is_within(source_base, 0, p.source_bytes) || !is_within(target_base, 0, p.target_bytes))
        return;
    int64_t source_offset = load(run + SOURCE_OFFSET), target_offset = load(run + TARGET_OFFSET);
    int64_t bytes = load(run + BYTES);
    if (!is_within(source_offset, bytes, p.source_bytes - source_base) ||
        !is_within(target_offset, bytes, p.target_bytes - target_base))
        return;
    const char* from = p.source + source_base + source_offset;
    char* to = p.target + target_base + target_offset;
    uint64_t alignment = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                         static_cast<uint64_t>(bytes);
    if (alignment % sizeof(Words4) == 0)
        copy_words<Words4>(from, to, bytes);
    else if (alignment % sizeof(uint32_t) == 0)
        copy_words<uint32_t>(from, to, bytes);
    else
        copy_words<uint8_t>(from, to, bytes);
}

}  // namespace wr::copy_runs
