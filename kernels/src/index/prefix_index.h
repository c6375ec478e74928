// Which worker holds which block in which tier: exact membership, whatever the order of events.
// Every public member may be called from any thread: look-ups share a lock, and what changes the
// index takes it for some thousand blocks at a time. An answer was true at a moment between two
// such slices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fair_lock.h"
#include "index/index_dump.h"
#include "index/index_tier.h"
#include "index/seats.h"
#include "worker_set/worker_set.h"

namespace kv {

class PrefixIndex {
 public:
  using Hashes = std::span<const std::uint64_t>;

  // Throws std::invalid_argument unless 1 <= workers <= 4096 and both bounds are at least 1.
  // The coldest entry is forgotten where one more would break a bound. `max_bytes` counts tables
  // and sets in use; the pool's slabs that are partly free come on top, as does the empty index.
  PrefixIndex(std::int64_t workers, std::int64_t max_entries, std::int64_t max_bytes = INT64_MAX);

  // The worker holds these blocks in the tier (0 gpu, 1 host, 2 disk); returns how many it did
  // not hold there before. Throws std::out_of_range for a worker or a tier the index does not
  // have, as the others do.
  std::size_t store(std::int64_t worker, Hashes hashes, int tier = 0);

  // The worker dropped these blocks; returns how many it held.
  std::size_t remove(std::int64_t worker, Hashes hashes, int tier = 0);

  // The worker holds nothing any more, in any tier; returns how many blocks it held. Takes no
  // longer however many: later writes sweep out what it left.
  std::size_t clear_worker(std::int64_t worker);

  // Writes to hits[0..workers) how many leading blocks of the chain each worker holds in tier 0.
  void longest_prefix(Hashes chain, std::int32_t* hits) const;

  // The same, but raises what is in hits[0..workers): it stays where it is not less.
  void raise_prefix(Hashes chain, std::int32_t* hits) const;

  // Writes three such rows: row t counts blocks held in any of the tiers 0..t.
  void longest_prefix_tiers(Hashes chain, std::int32_t* hits) const;

  // Where a prefix may end at workers that need more than its leading blocks: the last
  // `tier0_blocks` before the end in tier 0, or all where there are fewer, and the very last one in
  // tier 1 if `tier1_last`.
  struct EndRule {
    std::size_t tier0_blocks = 0;
    bool tier1_last = false;

    bool operator==(const EndRule&) const = default;
  };

  // Lowers hits[w] of each of these workers to the longest prefix of the chain, no longer than
  // that, that ends as `rule` wants it; 0 where there is none.
  void lower_to_ends(Hashes chain, const EndRule& rule, std::span<const std::size_t> workers,
                     std::int32_t* hits) const;

  std::size_t held(std::int64_t worker, int tier = 0) const;

  // How many of these blocks the worker holds in the tier.
  std::size_t contains(std::int64_t worker, Hashes hashes, int tier = 0) const;

  // Everything, as index_dump.h says. `load` throws std::invalid_argument for anything else.
  std::string dump() const;
  static std::unique_ptr<PrefixIndex> load(std::span<const std::uint8_t> bytes);

  // How many of the worker's blocks, over all tiers, were forgotten because of the bounds since it
  // was cleared last.
  std::size_t evicted_of(std::int64_t worker) const;

  int tiers() const;  // 1 + the highest tier that holds anything, at least 1
  std::size_t size() const;  // entries; must look at all of them while a sweep is under way
  std::size_t evicted() const;
  std::size_t memory_bytes() const;
  std::size_t workers() const { return seats_.workers(); }
  std::size_t max_entries() const { return max_entries_; }
  std::size_t max_bytes() const { return max_bytes_; }

 private:
  // Where the sweep goes on.
  struct Cursor {
    std::size_t tier = 0;
    std::size_t segment = 0;
    std::size_t slot = 0;
  };

  std::size_t checked(std::int64_t worker) const;
  IndexTier* tier_at(int tier) const;
  IndexTier& made_tier(int tier);
  std::size_t store_slice(std::size_t worker, Hashes hashes, int tier);
  std::size_t remove_slice(std::size_t worker, Hashes hashes, int tier);
  Record& add(IndexTier& tier, std::uint64_t hash);
  void load_entry(IndexTier& tier, const DumpEntry& entry);
  std::size_t entries() const;
  std::size_t bytes_in_use() const;
  void keep_in_bytes();
  void evict();
  void evict_from(IndexTier& tier, BlockTable& segment);
  void old_name_gone(unsigned seat);
  bool held_by_anybody(const Record& record) const;
  bool strip(IndexTier& tier, Record& record);
  void sweep(std::size_t slots);
  void sweep_all();

  mutable FairLock lock_;
  std::size_t max_entries_;
  std::size_t max_bytes_;
  std::size_t evicted_ = 0;
  std::vector<std::uint64_t> evicted_of_;  // by worker
  Seats seats_;
  WorkerSets sets_;
  std::array<std::unique_ptr<IndexTier>, kTiers> tiers_;  // none where nothing was ever stored
  std::size_t old_names_ = 0;  // (entry, seat) pairs whose seat nobody sits on any more
  Cursor cursor_;
};

}  // namespace kv
