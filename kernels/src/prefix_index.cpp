#include "prefix_index.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace kv {
namespace {

constexpr std::int64_t kMaxWorkers = 4096;
constexpr std::size_t kWordBits = 64;
constexpr std::size_t kAhead = 16;  // probes whose lines are on their way from memory

std::size_t checked_range(const char* name, std::int64_t value, std::int64_t high) {
  if (value < 1 || value > high) {
    const std::string wanted = high == INT64_MAX ? "at least 1" : "1.." + std::to_string(high);
    throw std::invalid_argument(std::string(name) + " must be " + wanted + ", got " +
                                std::to_string(value));
  }
  return static_cast<std::size_t>(value);
}

void prefetch_ahead(const BlockTable& table, PrefixIndex::Hashes hashes, std::size_t i) {
  if (i + kAhead < hashes.size()) table.prefetch(hashes[i + kAhead]);
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

PrefixIndex::PrefixIndex(std::int64_t workers, std::int64_t max_entries)
    : max_entries_(checked_range("max_entries", max_entries, INT64_MAX)),
      words_((checked_range("workers", workers, kMaxWorkers) + kWordBits - 1) / kWordBits),
      held_(static_cast<std::size_t>(workers)),
      alive_(words_),
      table_(words_, max_entries_) {}

std::size_t PrefixIndex::store(std::int64_t worker, Hashes hashes) {
  const std::size_t holder = checked(worker);
  const Bit bit(holder);
  const std::lock_guard lock(mutex_);
  std::size_t fresh = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    prefetch_ahead(table_, hashes, i);
    const std::size_t slot = slot_to_store(hashes[i]);
    table_.warm(slot);
    std::uint64_t& word = table_.set(slot)[bit.word];
    if ((word & bit.mask) == 0) {
      word |= bit.mask;
      ++held_[holder];
      ++fresh;
    }
  }
  return fresh;
}

std::size_t PrefixIndex::remove(std::int64_t worker, Hashes hashes) {
  const std::size_t holder = checked(worker);
  const Bit bit(holder);
  const std::lock_guard lock(mutex_);
  std::size_t gone = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    prefetch_ahead(table_, hashes, i);
    const auto [slot, occupied] = table_.locate(hashes[i]);
    if (!occupied) continue;
    std::uint64_t* set = table_.set(slot);
    if ((set[bit.word] & bit.mask) == 0) continue;
    set[bit.word] &= ~bit.mask;
    ++gone;
    if (std::all_of(set, set + words_, [](std::uint64_t word) { return word == 0; })) {
      table_.erase(slot);
    }
  }
  held_[holder] -= gone;
  return gone;
}

std::size_t PrefixIndex::clear_worker(std::int64_t worker) {
  const std::size_t holder = checked(worker);
  const Bit bit(holder);
  const std::lock_guard lock(mutex_);
  std::size_t& held = held_[holder];
  const std::size_t gone = held;
  for (std::size_t slot = 0; held > 0;) {
    std::uint64_t* set = table_.set(slot);
    if (!table_.occupied(slot) || (set[bit.word] & bit.mask) == 0) {
      ++slot;
      continue;
    }
    set[bit.word] &= ~bit.mask;
    --held;
    // The slot is looked at again: erasing may have moved a follower into it.
    if (std::all_of(set, set + words_, [](std::uint64_t word) { return word == 0; })) {
      table_.erase(slot);
    }
  }
  return gone;
}

void PrefixIndex::longest_prefix(Hashes chain, std::int32_t* hits) {
  std::fill_n(hits, workers(), 0);
  const std::lock_guard lock(mutex_);
  std::fill(alive_.begin(), alive_.end(), ~std::uint64_t{0});
  for (std::size_t i = 0; i < std::min(kAhead, chain.size()); ++i) table_.prefetch(chain[i]);
  // Workers that fall out at block `depth` hold `depth` leading blocks. Bits past the last
  // worker are in no stored set, so they fall out at the first block and are dropped there.
  const auto fall = [&](std::size_t word, std::uint64_t fallen, std::size_t depth) {
    for (; fallen != 0; fallen &= fallen - 1) {
      const std::size_t worker = word * kWordBits + lowest(fallen);
      if (worker < workers()) hits[worker] = static_cast<std::int32_t>(depth);
    }
  };
  std::size_t depth = 0;
  for (; depth < chain.size(); ++depth) {
    prefetch_ahead(table_, chain, depth);
    const auto [slot, occupied] = table_.locate(chain[depth]);
    if (!occupied) break;
    table_.warm(slot);
    const std::uint64_t* set = table_.set(slot);
    std::uint64_t left = 0;
    for (std::size_t word = 0; word < words_; ++word) {
      const std::uint64_t fallen = alive_[word] & ~set[word];
      if (fallen != 0) fall(word, fallen, depth);
      left |= alive_[word] &= set[word];
    }
    if (left == 0) return;
  }
  for (std::size_t word = 0; word < words_; ++word) fall(word, alive_[word], depth);
}

std::size_t PrefixIndex::size() const {
  const std::lock_guard lock(mutex_);
  return table_.size();
}

std::size_t PrefixIndex::evicted() const {
  const std::lock_guard lock(mutex_);
  return evicted_;
}

std::size_t PrefixIndex::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return sizeof *this - sizeof table_ + table_.memory_bytes() +
         held_.capacity() * sizeof(std::size_t) + alive_.capacity() * sizeof(std::uint64_t);
}

std::size_t PrefixIndex::checked(std::int64_t worker) const {
  if (worker < 0 || static_cast<std::size_t>(worker) >= workers()) {
    throw std::out_of_range("worker must be 0.." + std::to_string(workers() - 1) + ", got " +
                            std::to_string(worker));
  }
  return static_cast<std::size_t>(worker);
}

std::size_t PrefixIndex::slot_to_store(std::uint64_t hash) {
  BlockTable::Place place = table_.locate(hash);
  if (place.occupied) return place.slot;
  if (table_.size() >= max_entries_) {
    evict();
    place = table_.locate(hash);
  } else if (table_.make_room()) {
    place = table_.locate(hash);
  }
  table_.occupy(place.slot, hash);
  return place.slot;
}

void PrefixIndex::evict() {
  table_.evict_coldest([this](const std::uint64_t* set) {
    for (std::size_t word = 0; word < words_; ++word) {
      for (std::uint64_t left = set[word]; left != 0; left &= left - 1) {
        --held_[word * kWordBits + lowest(left)];
      }
    }
  });
  ++evicted_;
}

}  // namespace kv
