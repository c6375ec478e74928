// An open-addressing table from a 64-bit block hash to a worker set's word, and the clock that
// finds its coldest entry. One of the segments of an IndexTier. Not thread-safe but for `find` and
// `warm`, which readers may call at the same time while nobody changes.
//
// Layout: one flat record a slot, [hash, set word], probed linearly: a probe mostly touches one
// line. Deletion shifts the followers back, so no tombstones are left to slow down later probes.
// Every 64-bit key is legal: emptiness lives in the set word.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/prefetch.h"
#include "worker_set/set_word.h"

namespace kv {

struct Record {
  std::uint64_t hash;
  std::uint64_t set;  // 0: the slot is empty
};

// The hash spread over all bits, so that callers may name blocks as they like (small numbers).
constexpr std::uint64_t mix(std::uint64_t hash) {
  hash *= 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 32);
}

class BlockTable {
 public:
  struct Place {
    std::size_t slot;
    bool occupied;  // false: the hash is absent and `slot` is where it would go
  };

  // `segment_bits`: the highest bits of mixed hashes that are the same for all of its entries.
  // `first_slots`: how many slots it gets when the first entry comes.
  BlockTable(unsigned segment_bits, std::size_t first_slots);

  // Call before a run of probes some steps ahead: brings the record near.
  KV_PREFETCHES void prefetch(std::uint64_t mixed) const { prefetch_line(&records_[home(mixed)]); }

  Place locate(std::uint64_t hash, std::uint64_t mixed) const {
    for (std::size_t slot = home(mixed);; slot = next(slot)) {
      const Record& record = records_[slot];
      if (word_of(record) == 0) return {slot, false};
      if (record.hash == hash) return {slot, true};
    }
  }

  // The entry, or nullptr.
  Record* find(std::uint64_t hash, std::uint64_t mixed) const {
    const Place place = locate(hash, mixed);
    return place.occupied ? &records_[place.slot] : nullptr;
  }

  // Whether one more entry fits before it must grow.
  bool has_room() const { return size_ < most_; }

  // How many slots it should have before one more entry comes; slots() if it need not grow.
  // `most_entries`: what it will hold at most, as far as is known.
  std::size_t wanted_slots(std::size_t most_entries) const;

  // As many slots as so many entries need; for a table that is about to be filled.
  static std::size_t slots_for(std::size_t entries);

  // Lays the table out anew, which voids every slot found before.
  void grow(std::size_t slots);

  // Fills the empty `slot` that `locate` gave.
  void occupy(std::size_t slot, const Record& record) {
    records_[slot] = record;
    ++size_;
  }

  // Empties the slot; a follower may take its place, so look at `slot` again in a sweep.
  void erase(std::size_t slot);

  // The slot of the first entry, in clock order, whose warmth is used up; each pass of the hand
  // takes one away (GCLOCK: A. Smith, "Sequentiality and Prefetching in Database Systems", 1978).
  // Precondition: size() > 0.
  std::size_t coldest();

  // Counts a use of the entry, up to three: what is asked for again and again outlives a long
  // run of blocks that are stored once. Readers that meet here may lose a count, no more.
  static void warm(Record& record) {
    std::atomic_ref<std::uint64_t> word(record.set);
    const std::uint64_t seen = word.load(std::memory_order_relaxed);
    if ((seen & kWarmth) != kWarmth) word.store(seen + kOneUse, std::memory_order_relaxed);
  }

  static std::uint64_t word_of(const Record& record) {
    return std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(record.set))
        .load(std::memory_order_relaxed);
  }

  Record& at(std::size_t slot) const { return records_[slot]; }
  bool occupied(std::size_t slot) const { return word_of(records_[slot]) != 0; }
  std::size_t size() const { return size_; }
  std::size_t slots() const { return slots_; }
  std::size_t memory_bytes() const { return slots_ * sizeof(Record); }

 private:
  // The high part of a product scales a hash to any number of slots without a division
  // (D. Lemire, "Fast Random Integer Generation in an Interval", 2019).
  std::size_t home(std::uint64_t mixed) const {
    return static_cast<std::size_t>(
        (static_cast<unsigned __int128>(mixed << segment_bits_) * slots_) >> 64);
  }
  std::size_t next(std::size_t slot) const { return slot + 1 == slots_ ? 0 : slot + 1; }

  std::size_t slots_ = 1;
  unsigned segment_bits_;
  std::unique_ptr<Record[]> records_;
  std::size_t first_slots_;
  std::size_t size_ = 0;
  std::size_t most_ = 0;  // entries before it must grow
  // The clock's hand leaps by about the golden section of the table, coprime to its size, so it
  // still comes by every slot once a round. Going slot by slot it would clear the table behind
  // it while new blocks, spread evenly, crowd what lies ahead into ever longer clusters.
  std::size_t hand_ = 0;
  std::size_t leap_ = 0;
};

}  // namespace kv
