#include "prefix_index.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace kv {
namespace {

constexpr std::size_t kWordBits = 64;

std::size_t checked_range(const char* name, std::int64_t value, std::int64_t high) {
  if (value < 1 || value > high) {
    const std::string wanted = high == INT64_MAX ? "at least 1" : "1.." + std::to_string(high);
    throw std::invalid_argument(std::string(name) + " must be " + wanted + ", got " +
                                std::to_string(value));
  }
  return static_cast<std::size_t>(value);
}

std::size_t lowest(std::uint64_t bits) { return static_cast<std::size_t>(std::countr_zero(bits)); }

// One bit of a worker set.
struct Bit {
  explicit Bit(std::size_t worker)
      : word(worker / kWordBits), mask(std::uint64_t{1} << (worker % kWordBits)) {}

  std::size_t word;
  std::uint64_t mask;
};

}  // namespace

PrefixIndex::PrefixIndex(std::int64_t workers, std::int64_t max_entries, std::int64_t max_bytes)
    : workers_(0),
      max_entries_(checked_range("max_entries", max_entries, INT64_MAX)),
      max_bytes_(checked_range("max_bytes", max_bytes, INT64_MAX)),
      words_(0) {
  workers_ = checked_range("workers", workers, kMaxWorkers);
  words_ = (workers_ + kWordBits - 1) / kWordBits;
  tiers_[0] = std::make_unique<Tier>(workers_, words_, max_entries_);
}

std::size_t PrefixIndex::store(std::int64_t worker, Hashes hashes, int tier) {
  const std::size_t holder = checked(worker);
  const Bit bit(holder);
  const std::lock_guard lock(mutex_);
  if (tier_at(tier) == nullptr) {
    tiers_[static_cast<std::size_t>(tier)] = std::make_unique<Tier>(workers_, words_, max_entries_);
  }
  Tier& to = *tier_at(tier);
  std::size_t fresh = 0;
  for (const std::uint64_t hash : hashes) {
    const std::size_t slot = slot_to_store(to, hash);
    to.table.warm(slot);
    std::uint64_t& word = to.table.set(slot)[bit.word];
    if ((word & bit.mask) != 0) continue;
    word |= bit.mask;
    ++to.held[holder];
    ++fresh;
  }
  return fresh;
}

std::size_t PrefixIndex::remove(std::int64_t worker, Hashes hashes, int tier) {
  const std::size_t holder = checked(worker);
  const Bit bit(holder);
  const std::lock_guard lock(mutex_);
  Tier* from = tier_at(tier);
  if (from == nullptr) return 0;
  std::size_t gone = 0;
  for (const std::uint64_t hash : hashes) {
    const auto [slot, occupied] = from->table.locate(hash);
    if (!occupied) continue;
    std::uint64_t* set = from->table.set(slot);
    if ((set[bit.word] & bit.mask) == 0) continue;
    set[bit.word] &= ~bit.mask;
    ++gone;
    if (std::all_of(set, set + words_, [](std::uint64_t word) { return word == 0; })) {
      from->table.erase(slot);
    }
  }
  from->held[holder] -= gone;
  return gone;
}

std::size_t PrefixIndex::clear_worker(std::int64_t worker) {
  const std::size_t holder = checked(worker);
  const Bit bit(holder);
  const std::lock_guard lock(mutex_);
  std::size_t gone = 0;
  for (const auto& tier : tiers_) {
    if (tier == nullptr) continue;
    std::size_t& held = tier->held[holder];
    gone += held;
    for (std::size_t slot = 0; held > 0;) {
      std::uint64_t* set = tier->table.set(slot);
      if (!tier->table.occupied(slot) || (set[bit.word] & bit.mask) == 0) {
        ++slot;
        continue;
      }
      set[bit.word] &= ~bit.mask;
      --held;
      // The slot is looked at again: erasing may have moved a follower into it.
      if (std::all_of(set, set + words_, [](std::uint64_t word) { return word == 0; })) {
        tier->table.erase(slot);
      }
    }
  }
  return gone;
}

void PrefixIndex::longest_prefix(Hashes chain, std::int32_t* hits) const {
  std::vector<std::int32_t> rows(kTiers * workers_);
  longest_prefix_tiers(chain, rows.data());
  std::copy_n(rows.begin(), workers_, hits);
}

void PrefixIndex::longest_prefix_tiers(Hashes chain, std::int32_t* hits) const {
  std::fill_n(hits, kTiers * workers_, 0);
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> alive(kTiers * words_, ~std::uint64_t{0});
  std::vector<std::uint64_t> have(words_);
  for (std::size_t depth = 0; depth < chain.size(); ++depth) {
    std::fill(have.begin(), have.end(), 0);
    std::uint64_t left = 0;
    for (std::size_t row = 0; row < kTiers; ++row) {
      if (tiers_[row] != nullptr) {
        BlockTable& table = tiers_[row]->table;
        const auto [slot, occupied] = table.locate(chain[depth]);
        if (occupied) {
          if (row == 0) table.warm(slot);
          for (std::size_t word = 0; word < words_; ++word) have[word] |= table.set(slot)[word];
        }
      }
      for (std::size_t word = 0; word < words_; ++word) {
        alive[row * words_ + word] &= have[word];
        for (std::uint64_t bits = alive[row * words_ + word]; bits != 0; bits &= bits - 1) {
          ++hits[row * workers_ + word * kWordBits + lowest(bits)];
        }
        left |= alive[row * words_ + word];
      }
    }
    if (left == 0) return;
  }
}

std::size_t PrefixIndex::held(std::int64_t worker, int tier) const {
  const std::size_t holder = checked(worker);
  const std::lock_guard lock(mutex_);
  const Tier* of = tier_at(tier);
  return of == nullptr ? 0 : of->held[holder];
}

std::size_t PrefixIndex::contains(std::int64_t worker, Hashes hashes, int tier) const {
  const Bit bit(checked(worker));
  const std::lock_guard lock(mutex_);
  const Tier* of = tier_at(tier);
  if (of == nullptr) return 0;
  return static_cast<std::size_t>(std::count_if(hashes.begin(), hashes.end(), [&](auto hash) {
    const auto [slot, occupied] = of->table.locate(hash);
    return occupied && (of->table.set(slot)[bit.word] & bit.mask) != 0;
  }));
}

std::string PrefixIndex::dump() const {
  const std::lock_guard lock(mutex_);
  DumpHeader header{workers_, max_entries_, max_bytes_, evicted_, {}};
  std::size_t holders = 0;
  for (std::size_t t = 0; t < kTiers; ++t) {
    if (tiers_[t] == nullptr) continue;
    header.entries[t] = tiers_[t]->table.size();
    for (const std::size_t held : tiers_[t]->held) holders += held;
  }
  DumpWriter writer(header, holders);
  std::vector<std::uint16_t> of;
  for (const auto& tier : tiers_) {
    if (tier == nullptr) continue;
    const BlockTable& table = tier->table;
    for (std::size_t slot = 0; slot < table.slots(); ++slot) {
      if (!table.occupied(slot)) continue;
      of.clear();
      for (std::size_t worker = 0; worker < workers_; ++worker) {
        const Bit bit(worker);
        if ((table.set(slot)[bit.word] & bit.mask) != 0) {
          of.push_back(static_cast<std::uint16_t>(worker));
        }
      }
      writer.entry({table.key(slot), 0, of});
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
  index->evicted_ = header.evicted;
  for (int tier = 0; tier < kTiers; ++tier) {
    for (std::uint64_t i = 0; i < header.entries[static_cast<std::size_t>(tier)]; ++i) {
      const DumpEntry entry = reader.next();
      const Tier* of = index->tier_at(tier);
      if (of != nullptr && of->table.locate(entry.hash).occupied) {
        throw std::invalid_argument("not a dump of a prefix index: an entry twice");
      }
      for (const std::uint16_t worker : entry.holders) index->store(worker, {&entry.hash, 1}, tier);
    }
  }
  reader.expect_end();
  return index;
}

int PrefixIndex::tiers() const {
  const std::lock_guard lock(mutex_);
  for (int tier = kTiers; tier > 1; --tier) {
    const Tier* of = tier_at(tier - 1);
    if (of != nullptr && of->table.size() > 0) return tier;
  }
  return 1;
}

std::size_t PrefixIndex::size() const {
  const std::lock_guard lock(mutex_);
  return entries();
}

std::size_t PrefixIndex::evicted() const {
  const std::lock_guard lock(mutex_);
  return evicted_;
}

std::size_t PrefixIndex::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes();
}

std::size_t PrefixIndex::checked(std::int64_t worker) const {
  if (worker < 0 || static_cast<std::size_t>(worker) >= workers()) {
    throw std::out_of_range("worker must be 0.." + std::to_string(workers() - 1) + ", got " +
                            std::to_string(worker));
  }
  return static_cast<std::size_t>(worker);
}

PrefixIndex::Tier* PrefixIndex::tier_at(int tier) const {
  if (tier < 0 || tier >= kTiers) {
    throw std::out_of_range("tier must be 0..2, got " + std::to_string(tier));
  }
  return tiers_[static_cast<std::size_t>(tier)].get();
}

std::size_t PrefixIndex::entries() const {
  std::size_t entries = 0;
  for (const auto& tier : tiers_) entries += tier == nullptr ? 0 : tier->table.size();
  return entries;
}

std::size_t PrefixIndex::bytes() const {
  std::size_t bytes = sizeof *this;
  for (const auto& tier : tiers_) {
    if (tier == nullptr) continue;
    bytes += tier->table.memory_bytes() + tier->held.capacity() * sizeof(std::size_t);
  }
  return bytes;
}

std::size_t PrefixIndex::slot_to_store(Tier& tier, std::uint64_t hash) {
  BlockTable::Place place = tier.table.locate(hash);
  if (place.occupied) return place.slot;
  const std::size_t held = entries();
  if (held > 0 && (held >= max_entries_ || bytes() > max_bytes_)) evict();
  tier.table.make_room();
  place = tier.table.locate(hash);
  tier.table.occupy(place.slot, hash);
  return place.slot;
}

// Of the tier that has the most entries, the coldest one.
void PrefixIndex::evict() {
  const auto size = [](const std::unique_ptr<Tier>& tier) {
    return tier == nullptr ? 0 : tier->table.size();
  };
  Tier& tier = **std::max_element(tiers_.begin(), tiers_.end(), [&](const auto& a, const auto& b) {
    return size(a) < size(b);
  });
  tier.table.evict_coldest([&](const std::uint64_t* set) {
    for (std::size_t word = 0; word < words_; ++word) {
      for (std::uint64_t left = set[word]; left != 0; left &= left - 1) {
        --tier.held[word * kWordBits + lowest(left)];
      }
    }
  });
  ++evicted_;
}

}  // namespace kv
