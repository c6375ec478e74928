#include "index/index_tier.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kv {
namespace {

constexpr std::size_t kSegmentEntries = 1 << 16;  // laying out so many anew takes a millisecond
constexpr std::size_t kMostSegmentBits = 8;
constexpr double kFirstSlots = 64.0;
constexpr double kGrowth = 1.5;

unsigned bits_for(std::size_t max_entries) {
  const std::size_t bits = std::bit_width(max_entries / kSegmentEntries);
  return static_cast<unsigned>(std::min(kMostSegmentBits, bits));
}

// What uniform hashes put into one of so many segments, but for one case in 10^9.
std::size_t most_in(unsigned bits, std::size_t entries) {
  if (bits == 0) return entries;
  const auto mean = static_cast<double>(entries >> bits);
  return static_cast<std::size_t>(mean + 6.0 * std::sqrt(mean)) + 1;
}

}  // namespace

IndexTier::IndexTier(std::size_t seats, std::size_t max_entries)
    : held(seats), bits_(bits_for(max_entries)), most_in_segment_(most_in(bits_, max_entries)) {
  const std::size_t count = std::size_t{1} << bits_;
  segments_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Each starts at another point of one growth step, so that they do not all grow at once.
    const double start = std::pow(kGrowth, static_cast<double>(i) / static_cast<double>(count));
    segments_.emplace_back(bits_, static_cast<std::size_t>(kFirstSlots * start));
    table_bytes_ += segments_.back().memory_bytes();
  }
}

std::size_t IndexTier::growth_bytes(const BlockTable& segment) const {
  return (segment.wanted_slots(most_in_segment_) - segment.slots()) * sizeof(Record);
}

void IndexTier::grow(BlockTable& segment) {
  const std::size_t wanted = segment.wanted_slots(most_in_segment_);
  if (wanted == segment.slots()) return;
  table_bytes_ += (wanted - segment.slots()) * sizeof(Record);
  segment.grow(wanted);
}

void IndexTier::reserve(std::size_t entries) {
  const std::size_t slots = BlockTable::slots_for(most_in(bits_, entries));
  for (BlockTable& segment : segments_) {
    if (segment.slots() >= slots) continue;
    table_bytes_ += (slots - segment.slots()) * sizeof(Record);
    segment.grow(slots);
  }
}

void IndexTier::erase(const Record& record) {
  BlockTable& segment = segments_[number(mix(record.hash))];
  segment.erase(static_cast<std::size_t>(&record - &segment.at(0)));
  --size_;
}

BlockTable& IndexTier::next_to_evict() {
  do {
    hand_ = hand_ + 1 == segments_.size() ? 0 : hand_ + 1;
  } while (segments_[hand_].size() == 0);
  return segments_[hand_];
}

}  // namespace kv
