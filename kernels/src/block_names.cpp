#include "block_names.h"

#include <algorithm>
#include <random>

namespace kv {
namespace {

std::uint64_t any_odd_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) | 1;
}

}  // namespace

BlockNames::BlockNames() : key_(any_odd_number()), slots_(kLeastSlots) {}

void BlockNames::erase(const Known* entry) {
  std::size_t hole = static_cast<std::size_t>(entry - slots_.data());
  const std::size_t slots = slots_.size();
  for (std::size_t at = hole;;) {
    at = next(at);
    if (slots_[at].tiers() == 0) break;
    // A follower may move into the hole unless its home lies after the hole.
    const std::size_t start = home(slots_[at].name());
    const std::size_t from_home = at >= start ? at - start : at + slots - start;
    const std::size_t from_hole = at >= hole ? at - hole : at + slots - hole;
    if (from_home < from_hole) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole].set_tiers(0);
  --size_;
  if (slots > kLeastSlots && size_ * 1000 < slots * 535) {
    resize(std::max(kLeastSlots, size_ * 3 / 2));
  }
}

void BlockNames::clear() {
  slots_ = std::vector<Known>(kLeastSlots);
  size_ = 0;
}

void BlockNames::resize(std::size_t slots) {
  std::vector<Known> old(std::max(slots, kLeastSlots));
  old.swap(slots_);
  for (const Known& known : old) {
    if (known.tiers() == 0) continue;
    std::size_t at = home(known.name());
    while (slots_[at].tiers() != 0) at = next(at);
    slots_[at] = known;
  }
}

}  // namespace kv
