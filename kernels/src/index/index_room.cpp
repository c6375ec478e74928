// How PrefixIndex makes room: bounds, eviction, and the sweep after cleared workers.
#include <algorithm>
#include <array>

#include "index/prefix_index.h"

namespace kv {
namespace {

constexpr std::size_t kSweepBeforeEviction = 256;  // slots; something may be held by nobody
constexpr int kEvictionsAtOnce = 4;                // of one block stored

}  // namespace

Record& PrefixIndex::add(IndexTier& tier, std::uint64_t hash) {
  if (entries() >= max_entries_) {
    sweep(kSweepBeforeEviction);
    if (entries() >= max_entries_) evict();
  }
  BlockTable& segment = tier.home_of(hash);
  if (!segment.has_room()) {
    const std::size_t growth = tier.growth_bytes(segment);
    if (segment.size() > 0 && bytes_in_use() + growth > max_bytes_) {
      evict_from(tier, segment);
    } else {
      tier.grow(segment);
    }
  }
  return tier.add({hash, lanes::empty(0)});
}

void PrefixIndex::keep_in_bytes() {
  for (int i = 0; i < kEvictionsAtOnce && bytes_in_use() > max_bytes_ && entries() > 1; ++i) {
    evict();
  }
}

// Of the tier that has the most entries, the coldest of one segment.
void PrefixIndex::evict() {
  const auto size = [](const auto& tier) { return tier == nullptr ? 0 : tier->size(); };
  IndexTier& tier = **std::max_element(
      tiers_.begin(), tiers_.end(),
      [&](const auto& a, const auto& b) { return size(a) < size(b); });
  evict_from(tier, tier.next_to_evict());
}

void PrefixIndex::evict_from(IndexTier& tier, BlockTable& segment) {
  const std::size_t slot = segment.coldest();
  std::uint64_t& word = segment.at(slot).set;
  sets_.each(word, [&](unsigned seat) {
    --tier.held[seat];
    if (seats_.live(seat)) {
      --tier.live_held;
      ++evicted_of_[seats_.worker_on(seat)];
    } else {
      old_name_gone(seat);
    }
  });
  sets_.drop(word);
  tier.erase(segment.at(slot));
  ++evicted_;
}

void PrefixIndex::old_name_gone(unsigned seat) {
  --old_names_;
  const auto names = [seat](const auto& tier) { return tier != nullptr && tier->held[seat] != 0; };
  if (std::none_of(tiers_.begin(), tiers_.end(), names)) seats_.free(seat);
}

bool PrefixIndex::held_by_anybody(const Record& record) const {
  bool held = false;
  sets_.each(BlockTable::word_of(record), [&](unsigned seat) { held = held || seats_.live(seat); });
  return held;
}

// Takes the old names out of the entry. True if nobody holds it then.
bool PrefixIndex::strip(IndexTier& tier, Record& record) {
  std::array<std::uint16_t, WorkerSets::kMostSeats> old;
  std::size_t size = 0;
  sets_.each(record.set, [&](unsigned seat) {
    if (!seats_.live(seat)) old[size++] = static_cast<std::uint16_t>(seat);
  });
  for (std::size_t i = 0; i < size; ++i) {
    sets_.erase(record.set, old[i]);
    --tier.held[old[i]];
    old_name_gone(old[i]);
  }
  return WorkerSets::empty(record.set);
}

// Looks at the next `slots` slots. An entry that moves behind the sweep meanwhile is met on the
// next round: seats are free only when no entry names them.
void PrefixIndex::sweep(std::size_t slots) {
  for (; slots > 0 && old_names_ > 0; --slots) {
    IndexTier* tier = tiers_[cursor_.tier].get();
    if (tier == nullptr || cursor_.segment == tier->segments().size()) {
      cursor_ = {(cursor_.tier + 1) % kTiers, 0, 0};
      continue;
    }
    BlockTable& segment = tier->segment_at(cursor_.segment);
    if (cursor_.slot >= segment.slots()) {
      cursor_ = {cursor_.tier, cursor_.segment + 1, 0};
      continue;
    }
    Record& record = segment.at(cursor_.slot);
    if (record.set != 0 && strip(*tier, record)) {
      tier->erase(record);  // a follower may be here now: look again
    } else {
      ++cursor_.slot;
    }
  }
}

void PrefixIndex::sweep_all() {
  while (old_names_ > 0) sweep(1 << 20);
}

}  // namespace kv
