// The 64 bits that say who holds a block. From the top: 8 bits unused, 2 of form, 2 of warmth
// (how often the entry was used of late), 52 of content: up to four seats of 13 bits each
// (worker_set_lanes.h), or where in the pool the seats are (worker_set_array.h, _bitmap.h).
// All zero: an empty slot of the table.
#pragma once

#include <cstdint>

namespace kv {

enum class SetForm : std::uint8_t { none = 0, lanes = 1, array = 2, bitmap = 3 };

constexpr unsigned kContentBits = 52;
constexpr std::uint64_t kContent = (std::uint64_t{1} << kContentBits) - 1;
constexpr std::uint64_t kOneUse = std::uint64_t{1} << kContentBits;
constexpr std::uint64_t kWarmth = 3 * kOneUse;
constexpr unsigned kFormShift = kContentBits + 2;

constexpr SetForm form_of(std::uint64_t word) { return static_cast<SetForm>(word >> kFormShift); }

constexpr std::uint64_t warmth_of(std::uint64_t word) { return (word & kWarmth) >> kContentBits; }

// The same entry with its seats elsewhere: warmth stays.
constexpr std::uint64_t recast(std::uint64_t word, SetForm form, std::uint64_t content) {
  return (word & kWarmth) | (static_cast<std::uint64_t>(form) << kFormShift) | content;
}

}  // namespace kv
