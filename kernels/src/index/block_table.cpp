#include "index/block_table.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kv {
namespace {

std::size_t leap_over(std::size_t slots) {
  std::size_t leap = slots - slots * 382 / 1000;
  while (std::gcd(leap, slots) != 1) ++leap;
  return leap % slots;
}

// The most that slots_for gives no more slots to.
std::size_t entries_in(std::size_t slots) {
  std::size_t entries = slots * 3 / 4;
  while (entries > 0 && BlockTable::slots_for(entries) > slots) --entries;
  return entries;
}

}  // namespace

BlockTable::BlockTable(unsigned segment_bits, std::size_t first_slots)
    : segment_bits_(segment_bits),
      records_(std::make_unique<Record[]>(slots_)),
      first_slots_(first_slots) {}

// At most 3/4 full: linear probing then needs about 2.5 looks for a hit, 8.5 for a miss, four of
// them in a cache line (D. Knuth, TAOCP vol. 3, 6.4).
std::size_t BlockTable::slots_for(std::size_t entries) { return entries + entries / 3 + 2; }

std::size_t BlockTable::wanted_slots(std::size_t most_entries) const {
  if (has_room()) return slots_;
  const std::size_t least = slots_for(size_ + 1);
  const std::size_t usual = std::max(first_slots_, slots_ + slots_ / 2);
  const std::size_t most = slots_for(most_entries);
  return least <= most ? std::clamp(usual, least, most) : least + least / 8;
}

void BlockTable::grow(std::size_t slots) {
  auto records = std::make_unique<Record[]>(slots);
  records.swap(records_);
  const std::size_t before = std::exchange(slots_, slots);
  most_ = entries_in(slots);
  hand_ = 0;
  leap_ = leap_over(slots);
  // Homes keep their order in a table of another size: both tables are walked from end to end.
  for (std::size_t from = 0; from < before; ++from) {
    const Record& record = records[from];
    if (record.set == 0) continue;
    std::size_t slot = home(mix(record.hash));
    while (records_[slot].set != 0) slot = next(slot);
    records_[slot] = record;
  }
}

void BlockTable::erase(std::size_t slot) {
  std::size_t hole = slot;
  for (std::size_t at = next(hole); records_[at].set != 0; at = next(at)) {
    // A follower may move into the hole unless its home lies after the hole: a probe for it
    // would then start behind its new place.
    const std::size_t start = home(mix(records_[at].hash));
    const std::size_t from_home = at >= start ? at - start : at + slots_ - start;
    const std::size_t from_hole = at >= hole ? at - hole : at + slots_ - hole;
    if (from_home < from_hole) continue;
    records_[hole] = records_[at];
    hole = at;
  }
  records_[hole].set = 0;
  --size_;
}

std::size_t BlockTable::coldest() {
  for (;; hand_ = hand_ + leap_ < slots_ ? hand_ + leap_ : hand_ + leap_ - slots_) {
    std::uint64_t& word = records_[hand_].set;
    if (word == 0) continue;
    if ((word & kWarmth) == 0) return hand_;
    word -= kOneUse;
  }
}

}  // namespace kv
