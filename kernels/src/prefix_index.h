// Which worker holds which block in which tier: exact membership, whatever the order of events.
// Every public member may be called from any thread; one lock serves them all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "block_table.h"
#include "index_dump.h"

namespace kv {

class PrefixIndex {
 public:
  using Hashes = std::span<const std::uint64_t>;

  // Throws std::invalid_argument unless 1 <= workers <= 4096 and both bounds are at least 1.
  // The coldest entry is forgotten when one of the bounds is reached.
  PrefixIndex(std::int64_t workers, std::int64_t max_entries, std::int64_t max_bytes = INT64_MAX);

  // The worker holds these blocks in the tier (0 gpu, 1 host, 2 disk); returns how many it did
  // not hold there before. Throws std::out_of_range for a worker or a tier the index does not
  // have, as the others do.
  std::size_t store(std::int64_t worker, Hashes hashes, int tier = 0);

  // The worker dropped these blocks; returns how many it held.
  std::size_t remove(std::int64_t worker, Hashes hashes, int tier = 0);

  // The worker holds nothing any more, in any tier; returns how many blocks it held.
  std::size_t clear_worker(std::int64_t worker);

  // Writes to hits[0..workers) how many leading blocks of the chain each worker holds in tier 0.
  void longest_prefix(Hashes chain, std::int32_t* hits) const;

  // Writes three such rows: row t counts blocks held in any of the tiers 0..t.
  void longest_prefix_tiers(Hashes chain, std::int32_t* hits) const;

  std::size_t held(std::int64_t worker, int tier = 0) const;

  // How many of these blocks the worker holds in the tier.
  std::size_t contains(std::int64_t worker, Hashes hashes, int tier = 0) const;

  // Everything, as index_dump.h says. `load` throws std::invalid_argument for anything else.
  std::string dump() const;
  static std::unique_ptr<PrefixIndex> load(std::span<const std::uint8_t> bytes);

  int tiers() const;  // 1 + the highest tier that holds anything, at least 1
  std::size_t size() const;
  std::size_t evicted() const;
  std::size_t memory_bytes() const;
  std::size_t workers() const { return workers_; }
  std::size_t max_entries() const { return max_entries_; }
  std::size_t max_bytes() const { return max_bytes_; }

 private:
  struct Tier {
    Tier(std::size_t workers, std::size_t words, std::size_t max_entries)
        : held(workers), table(words, max_entries) {}

    std::vector<std::size_t> held;  // blocks each worker holds
    BlockTable table;
  };

  std::size_t checked(std::int64_t worker) const;
  Tier* tier_at(int tier) const;
  std::size_t entries() const;
  std::size_t bytes() const;
  std::size_t slot_to_store(Tier& tier, std::uint64_t hash);
  void evict();

  mutable std::mutex mutex_;
  std::size_t workers_;
  std::size_t max_entries_;
  std::size_t max_bytes_;
  std::size_t words_;  // of one worker set
  std::size_t evicted_ = 0;
  std::array<std::unique_ptr<Tier>, kTiers> tiers_;  // none where nothing was ever stored
};

}  // namespace kv
