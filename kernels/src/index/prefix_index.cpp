#include "index/prefix_index.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace kv {
namespace {

constexpr std::size_t kSlice = 2048;  // blocks written under one hold of the lock
constexpr std::size_t kAhead = 16;    // probes whose lines are on their way from memory

std::size_t checked_range(const char* name, std::int64_t value, std::int64_t high) {
  if (value < 1 || value > high) {
    const std::string wanted = high == INT64_MAX ? "at least 1" : "1.." + std::to_string(high);
    throw std::invalid_argument(std::string(name) + " must be " + wanted + ", got " +
                                std::to_string(value));
  }
  return static_cast<std::size_t>(value);
}

// Calls write(slice) for each slice and adds up what it returns.
template <class Write>
std::size_t in_slices(PrefixIndex::Hashes hashes, Write write) {
  std::size_t changed = 0;
  for (std::size_t at = 0; at < hashes.size(); at += kSlice) {
    changed += write(hashes.subspan(at, std::min(kSlice, hashes.size() - at)));
  }
  return changed;
}

// Has the records of the first blocks under way before the loop over all of them begins.
KV_PREFETCHES void prefetch_first(const IndexTier& tier, PrefixIndex::Hashes hashes) {
  for (std::size_t i = 0; i < std::min(kAhead, hashes.size()); ++i) tier.prefetch(hashes[i]);
}

}  // namespace

PrefixIndex::PrefixIndex(std::int64_t workers, std::int64_t max_entries, std::int64_t max_bytes)
    : max_entries_(checked_range("max_entries", max_entries, INT64_MAX)),
      max_bytes_(checked_range("max_bytes", max_bytes, INT64_MAX)),
      evicted_of_(checked_range("workers", workers, kMaxWorkers)),
      seats_(evicted_of_.size()) {}

std::size_t PrefixIndex::store(std::int64_t worker, Hashes hashes, int tier) {
  const std::size_t holder = checked(worker);
  tier_at(tier);
  return in_slices(hashes, [&](Hashes slice) {
    const std::lock_guard lock(lock_);
    return store_slice(holder, slice, tier);
  });
}

std::size_t PrefixIndex::remove(std::int64_t worker, Hashes hashes, int tier) {
  const std::size_t holder = checked(worker);
  tier_at(tier);
  return in_slices(hashes, [&](Hashes slice) {
    const std::lock_guard lock(lock_);
    return remove_slice(holder, slice, tier);
  });
}

std::size_t PrefixIndex::clear_worker(std::int64_t worker) {
  const std::size_t holder = checked(worker);
  const std::lock_guard lock(lock_);
  const unsigned seat = seats_.of(holder);
  evicted_of_[holder] = 0;
  std::size_t gone = 0;
  for (const auto& tier : tiers_) gone += tier == nullptr ? 0 : tier->held[seat];
  if (gone == 0) return 0;
  if (!seats_.has_spare()) sweep_all();
  for (const auto& tier : tiers_) {
    if (tier != nullptr) tier->live_held -= tier->held[seat];
  }
  old_names_ += gone;
  seats_.change(holder);
  return gone;
}

std::size_t PrefixIndex::held(std::int64_t worker, int tier) const {
  const std::size_t holder = checked(worker);
  const std::shared_lock lock(lock_);
  const IndexTier* of = tier_at(tier);
  return of == nullptr ? 0 : of->held[seats_.of(holder)];
}

std::size_t PrefixIndex::contains(std::int64_t worker, Hashes hashes, int tier) const {
  const std::size_t holder = checked(worker);
  const std::shared_lock lock(lock_);
  const IndexTier* of = tier_at(tier);
  if (of == nullptr) return 0;
  std::size_t held = 0;
  prefetch_first(*of, hashes);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i + kAhead < hashes.size()) of->prefetch(hashes[i + kAhead]);
    const Record* record = of->find(hashes[i]);
    if (record == nullptr) continue;
    if (sets_.contains(BlockTable::word_of(*record), seats_.of(holder))) ++held;
  }
  return held;
}

int PrefixIndex::tiers() const {
  const std::shared_lock lock(lock_);
  int tier = kTiers;
  while (tier > 1 && (tier_at(tier - 1) == nullptr || tier_at(tier - 1)->live_held == 0)) --tier;
  return tier;
}

std::size_t PrefixIndex::size() const {
  const std::shared_lock lock(lock_);
  if (old_names_ == 0) return entries();
  std::size_t held = 0;
  for (const auto& tier : tiers_) {
    if (tier == nullptr) continue;
    for (const BlockTable& segment : tier->segments()) {
      for (std::size_t slot = 0; slot < segment.slots(); ++slot) {
        if (held_by_anybody(segment.at(slot))) ++held;
      }
    }
  }
  return held;
}

std::size_t PrefixIndex::evicted() const {
  const std::shared_lock lock(lock_);
  return evicted_;
}

std::size_t PrefixIndex::evicted_of(std::int64_t worker) const {
  const std::size_t holder = checked(worker);
  const std::shared_lock lock(lock_);
  return evicted_of_[holder];
}

std::size_t PrefixIndex::memory_bytes() const {
  const std::shared_lock lock(lock_);
  return sizeof *this + bytes_in_use() - sets_.used_bytes() + sets_.memory_bytes() +
         seats_.memory_bytes() + evicted_of_.capacity() * sizeof evicted_of_[0];
}

std::size_t PrefixIndex::checked(std::int64_t worker) const {
  if (worker < 0 || static_cast<std::size_t>(worker) >= workers()) {
    throw std::out_of_range("worker must be 0.." + std::to_string(workers() - 1) + ", got " +
                            std::to_string(worker));
  }
  return static_cast<std::size_t>(worker);
}

IndexTier* PrefixIndex::tier_at(int tier) const {
  if (tier < 0 || tier >= kTiers) {
    throw std::out_of_range("tier must be 0..2, got " + std::to_string(tier));
  }
  return tiers_[static_cast<std::size_t>(tier)].get();
}

IndexTier& PrefixIndex::made_tier(int tier) {
  auto& made = tiers_[static_cast<std::size_t>(tier)];
  if (made == nullptr) made = std::make_unique<IndexTier>(seats_.size(), max_entries_);
  return *made;
}

std::size_t PrefixIndex::store_slice(std::size_t worker, Hashes hashes, int tier) {
  IndexTier& to = made_tier(tier);
  const unsigned seat = seats_.of(worker);
  std::size_t fresh = 0;
  prefetch_first(to, hashes);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i + kAhead < hashes.size()) to.prefetch(hashes[i + kAhead]);
    Record* found = to.find(hashes[i]);
    Record& record = found != nullptr ? *found : add(to, hashes[i]);
    BlockTable::warm(record);
    if (!sets_.insert(record.set, seat)) continue;
    ++to.held[seat];
    ++to.live_held;
    ++fresh;
    keep_in_bytes();
  }
  if (old_names_ != 0) sweep(4 * hashes.size() + 64);
  return fresh;
}

std::size_t PrefixIndex::remove_slice(std::size_t worker, Hashes hashes, int tier) {
  IndexTier* from = tier_at(tier);
  if (from == nullptr) return 0;
  const unsigned seat = seats_.of(worker);
  std::size_t gone = 0;
  prefetch_first(*from, hashes);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i + kAhead < hashes.size()) from->prefetch(hashes[i + kAhead]);
    Record* record = from->find(hashes[i]);
    if (record == nullptr || !sets_.erase(record->set, seat)) continue;
    ++gone;
    if (WorkerSets::empty(record->set)) from->erase(*record);
  }
  from->held[seat] -= gone;
  from->live_held -= gone;
  if (old_names_ != 0) sweep(4 * hashes.size() + 64);
  return gone;
}

std::size_t PrefixIndex::entries() const {
  std::size_t entries = 0;
  for (const auto& tier : tiers_) entries += tier == nullptr ? 0 : tier->size();
  return entries;
}

std::size_t PrefixIndex::bytes_in_use() const {
  std::size_t bytes = sets_.used_bytes();
  for (const auto& tier : tiers_) bytes += tier == nullptr ? 0 : tier->memory_bytes();
  return bytes;
}

}  // namespace kv
