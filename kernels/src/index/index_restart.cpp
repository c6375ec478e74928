// How PrefixIndex becomes bytes and comes back.
#include <algorithm>
#include <array>
#include <shared_mutex>
#include <stdexcept>

#include "index/prefix_index.h"

namespace kv {

std::string PrefixIndex::dump() const {
  const std::shared_lock lock(lock_);
  DumpHeader header{workers(), max_entries_, max_bytes_, evicted_, {}};
  std::size_t holders = 0;
  for (std::size_t t = 0; t < kTiers; ++t) {
    if (tiers_[t] == nullptr) continue;
    header.entries[t] = tiers_[t]->size();
    holders += tiers_[t]->live_held;
  }
  DumpWriter writer(header, holders);
  std::array<std::uint16_t, kMaxWorkers> of;
  for (std::size_t t = 0; t < kTiers; ++t) {
    if (tiers_[t] == nullptr) continue;
    for (const BlockTable& segment : tiers_[t]->segments()) {
      for (std::size_t slot = 0; slot < segment.slots(); ++slot) {
        const Record& record = segment.at(slot);
        const std::uint64_t word = BlockTable::word_of(record);
        std::size_t size = 0;
        sets_.each(word, [&](unsigned seat) {
          if (seats_.live(seat)) of[size++] = static_cast<std::uint16_t>(seats_.worker_on(seat));
        });
        if (size == 0) continue;
        std::sort(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(size));
        writer.entry(t, {record.hash, warmth_of(word), {of.data(), size}});
      }
    }
  }
  return std::move(writer).finish();
}

std::unique_ptr<PrefixIndex> PrefixIndex::load(std::span<const std::uint8_t> bytes) {
  DumpReader reader(bytes);
  const DumpHeader& header = reader.header();
  const auto number = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  auto index = std::make_unique<PrefixIndex>(number(header.workers), number(header.max_entries),
                                             number(header.max_bytes));
  for (std::size_t t = 0; t < kTiers; ++t) {
    if (header.entries[t] == 0) continue;
    IndexTier& tier = index->made_tier(static_cast<int>(t));
    tier.reserve(header.entries[t]);
    for (std::uint64_t i = 0; i < header.entries[t]; ++i) index->load_entry(tier, reader.next());
  }
  reader.expect_end();
  index->evicted_ += header.evicted;
  return index;
}

// The index is new: every worker sits on the seat of its own number.
void PrefixIndex::load_entry(IndexTier& tier, const DumpEntry& entry) {
  if (tier.find(entry.hash) != nullptr) {
    throw std::invalid_argument("not a dump of a prefix index: an entry twice");
  }
  Record& record = add(tier, entry.hash);
  record.set = sets_.make(entry.holders) + entry.warmth * kOneUse;
  for (const std::uint16_t worker : entry.holders) ++tier.held[worker];
  tier.live_held += entry.holders.size();
  keep_in_bytes();
}

}  // namespace kv
