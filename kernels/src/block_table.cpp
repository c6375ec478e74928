#include "block_table.h"

#include <algorithm>
#include <numeric>

namespace kv {
namespace {

constexpr std::size_t kFirstSlots = 64;
constexpr std::size_t kLineWords = 8;  // 64-bit words of a cache line

// At most 3/4 full: linear probing then needs about 2.5 looks for a hit, 8.5 for a miss
// (D. Knuth, TAOCP vol. 3, 6.4).
constexpr std::size_t slots_for(std::size_t entries) { return entries + entries / 3 + 2; }

std::size_t leap_over(std::size_t slots) {
  std::size_t leap = slots - slots * 382 / 1000;
  while (std::gcd(leap, slots) != 1) ++leap;
  return leap % slots;
}

}  // namespace

BlockTable::BlockTable(std::size_t set_words, std::size_t max_entries)
    : stride_(set_words + 1),
      max_slots_(slots_for(max_entries)),
      leap_(leap_over(std::min(kFirstSlots, max_slots_))),
      control_(std::min(kFirstSlots, max_slots_)),
      records_(std::make_unique_for_overwrite<std::uint64_t[]>(control_.size() * stride_)) {}

// Block hashes are uniform, but callers may name blocks as they like (small numbers, say).
std::uint64_t BlockTable::mix(std::uint64_t hash) {
  hash *= 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 32);
}

std::uint8_t BlockTable::cold_control(std::uint64_t mixed) {
  return static_cast<std::uint8_t>(kOccupied | (mixed & kTag));
}

// The high part of a product scales a hash to any number of slots without a division
// (D. Lemire, "Fast Random Integer Generation in an Interval", 2019).
std::size_t BlockTable::home(std::uint64_t mixed) const {
  return static_cast<std::size_t>((static_cast<unsigned __int128>(mixed) * slots()) >> 64);
}

void BlockTable::prefetch(std::uint64_t hash) const {
  const std::size_t slot = home(mix(hash));
  const std::uint64_t* record = &records_[slot * stride_];
  __builtin_prefetch(&control_[slot]);
  for (std::size_t word = 0; word < stride_; word += kLineWords) {
    __builtin_prefetch(record + word);
  }
  __builtin_prefetch(record + stride_ - 1);  // a record may end in one line more than it fills
}

BlockTable::Place BlockTable::locate(std::uint64_t hash) const {
  const std::uint64_t mixed = mix(hash);
  const std::uint8_t cold = cold_control(mixed);
  for (std::size_t slot = home(mixed);; slot = next(slot)) {
    const std::uint8_t control = control_[slot];
    if (control == 0) return {slot, false};
    if ((control & ~kWarmth) == cold && key(slot) == hash) return {slot, true};
  }
}

bool BlockTable::make_room() {
  if (slots_for(size_ + 1) <= slots()) return false;
  rehash(std::min(max_slots_, slots() + slots() / 2));
  return true;
}

void BlockTable::occupy(std::size_t slot, std::uint64_t hash) {
  control_[slot] = cold_control(mix(hash));
  records_[slot * stride_] = hash;
  std::fill_n(set(slot), stride_ - 1, 0);
  ++size_;
}

void BlockTable::erase(std::size_t slot) {
  std::size_t hole = slot;
  for (std::size_t at = next(hole); control_[at] != 0; at = next(at)) {
    // A follower may move into the hole unless its home lies after the hole: a probe for it
    // would then start behind its new place.
    const std::size_t start = home(mix(key(at)));
    const std::size_t from_home = at >= start ? at - start : at + slots() - start;
    const std::size_t from_hole = at >= hole ? at - hole : at + slots() - hole;
    if (from_home < from_hole) continue;
    move_record(at, hole);
    hole = at;
  }
  control_[hole] = 0;
  --size_;
}

std::size_t BlockTable::coldest() {
  for (;; hand_ = hand_ + leap_ < slots() ? hand_ + leap_ : hand_ + leap_ - slots()) {
    if (control_[hand_] == 0) continue;
    if ((control_[hand_] & kWarmth) == 0) return hand_;
    control_[hand_] -= kOneUse;
  }
}

std::size_t BlockTable::memory_bytes() const {
  return sizeof *this + slots() * (sizeof control_[0] + stride_ * sizeof records_[0]);
}

void BlockTable::move_record(std::size_t from, std::size_t to) {
  control_[to] = control_[from];
  std::copy_n(&records_[from * stride_], stride_, &records_[to * stride_]);
}

void BlockTable::rehash(std::size_t new_slots) {
  std::vector<std::uint8_t> control(new_slots);
  auto records = std::make_unique_for_overwrite<std::uint64_t[]>(new_slots * stride_);
  control.swap(control_);
  records.swap(records_);
  hand_ = 0;
  leap_ = leap_over(new_slots);
  for (std::size_t from = 0; from < control.size(); ++from) {
    if (control[from] == 0) continue;
    const std::uint64_t* record = &records[from * stride_];
    const std::size_t to = locate(record[0]).slot;
    control_[to] = control[from];
    std::copy_n(record, stride_, &records_[to * stride_]);
  }
}

}  // namespace kv
