#include "events/block_names.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

namespace kv {
namespace {

std::uint64_t any_odd_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) | 1;
}

}  // namespace

BlockNames::Room::Room(std::size_t wanted)
    : groups((std::max(wanted, kLeastSlots) + kSlotsInGroup - 1) / kSlotsInGroup),
      bytes(std::make_unique<std::uint64_t[]>(groups)),
      slots(std::make_unique_for_overwrite<Group[]>(groups)) {}

BlockNames::Room::Room(const Room& other) : Room(other.groups * kSlotsInGroup) {
  std::memcpy(bytes.get(), other.bytes.get(), groups * sizeof bytes[0]);
  std::memcpy(slots.get(), other.slots.get(), groups * sizeof slots[0]);
}

BlockNames::BlockNames() : key_(any_odd_number()), room_(kLeastSlots) {}

// A search goes on behind a group only where that is full. So an entry from behind must follow
// into a hole of a full group, if a search for it comes by there.
void BlockNames::erase(const Known& known) {
  const auto at = static_cast<std::size_t>(known.byte_ - byte(0, 0));
  std::size_t hole = at / kSlotsInGroup;
  std::size_t slot = at % kSlotsInGroup;
  bool was_full = empty(room_.bytes[hole]) == 0;
  *byte(hole, slot) = 0;
  for (std::size_t group = next(hole); was_full && group != hole; group = next(group)) {
    const bool full = empty(room_.bytes[group]) == 0;
    for (std::uint64_t left = ~empty(room_.bytes[group]) & kTops; left != 0; left &= left - 1) {
      const Known follower = entry(group, first(left), 0);
      const std::size_t start = home(mix(follower.name()));
      const std::size_t from_home = group >= start ? group - start : group + room_.groups - start;
      const std::size_t from_hole = group >= hole ? group - hole : group + room_.groups - hole;
      if (from_home < from_hole) continue;
      const Known filled_hole = entry(hole, slot, 0);
      *filled_hole.slot_ = *follower.slot_;
      *filled_hole.byte_ = *follower.byte_;
      *follower.byte_ = 0;
      hole = group;
      slot = first(left);
      break;
    }
    was_full = full;
  }
  --size_;
  const std::size_t slots = room_.groups * kSlotsInGroup;
  if (slots > kLeastSlots && size_ * 1000 < slots * 535) resize(size_ * 3 / 2);
}

void BlockNames::clear() {
  room_ = Room(kLeastSlots);
  size_ = 0;
}

void BlockNames::resize(std::size_t slots) {
  const Room old = std::exchange(room_, Room(slots));
  for (std::size_t from = 0; from < old.groups; ++from) {
    for (std::uint64_t left = ~empty(old.bytes[from]) & kTops; left != 0; left &= left - 1) {
      const Slot& slot = old.slots[from].slots[first(left)];
      std::size_t group = home(mix(slot.name));
      while (empty(room_.bytes[group]) == 0) group = next(group);
      const std::size_t to = first(empty(room_.bytes[group]));
      room_.slots[group].slots[to] = slot;
      *byte(group, to) = static_cast<std::uint8_t>(old.bytes[from] >> (8 * first(left)));
    }
  }
}

}  // namespace kv
