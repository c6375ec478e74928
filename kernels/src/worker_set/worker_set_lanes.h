// The smallest form of a worker set: up to four seats in the word itself, in order of arrival.
#pragma once

#include <cstdint>

#include "worker_set/set_word.h"

namespace kv::lanes {

constexpr unsigned kMost = 4;
constexpr unsigned kBits = 13;
constexpr std::uint64_t kNoSeat = (1U << kBits) - 1;

constexpr std::uint64_t empty(std::uint64_t word) {
  return recast(word, SetForm::lanes, kContent);
}

constexpr unsigned seat(std::uint64_t word, unsigned lane) {
  return static_cast<unsigned>((word >> (kBits * lane)) & kNoSeat);
}

constexpr unsigned count(std::uint64_t word) {
  unsigned lane = 0;
  while (lane < kMost && seat(word, lane) != kNoSeat) ++lane;
  return lane;
}

// The lane of the seat, or kMost.
constexpr unsigned find(std::uint64_t word, unsigned wanted) {
  unsigned lane = 0;
  while (lane < kMost && seat(word, lane) != wanted) ++lane;
  return lane;
}

// `lane` is the first empty one.
constexpr std::uint64_t with(std::uint64_t word, unsigned lane, unsigned seat) {
  return word ^ ((kNoSeat ^ seat) << (kBits * lane));
}

constexpr std::uint64_t without(std::uint64_t word, unsigned lane) {
  const std::uint64_t below = (std::uint64_t{1} << (kBits * lane)) - 1;
  const std::uint64_t content = word & kContent;
  const std::uint64_t moved = (content >> kBits) | (kNoSeat << (kBits * (kMost - 1)));
  return (word & ~kContent) | (content & below) | (moved & ~below);
}

}  // namespace kv::lanes
