// Which worker holds which block: exact membership, whatever the order of events.
// Every public member may be called from any thread; one lock serves them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "block_table.h"

namespace kv {

class PrefixIndex {
 public:
  using Hashes = std::span<const std::uint64_t>;

  // Throws std::invalid_argument unless 1 <= workers <= 4096 and max_entries >= 1.
  PrefixIndex(std::int64_t workers, std::int64_t max_entries);

  // The worker holds these blocks; returns how many it did not hold before. Throws
  // std::out_of_range for a worker the index does not have, as the next two do.
  std::size_t store(std::int64_t worker, Hashes hashes);

  // The worker dropped these blocks; returns how many it held.
  std::size_t remove(std::int64_t worker, Hashes hashes);

  // The worker holds nothing any more; returns how many blocks it held.
  std::size_t clear_worker(std::int64_t worker);

  // Writes to hits[0..workers) how many leading blocks of the chain each worker holds.
  void longest_prefix(Hashes chain, std::int32_t* hits);

  std::size_t size() const;
  std::size_t evicted() const;
  std::size_t memory_bytes() const;
  std::size_t workers() const { return held_.size(); }
  std::size_t max_entries() const { return max_entries_; }

 private:
  std::size_t checked(std::int64_t worker) const;
  std::size_t slot_to_store(std::uint64_t hash);
  void evict();

  mutable std::mutex mutex_;
  std::size_t max_entries_;
  std::size_t words_;               // of one worker set
  std::size_t evicted_ = 0;
  std::vector<std::size_t> held_;   // blocks each worker holds
  std::vector<std::uint64_t> alive_;  // scratch of longest_prefix: workers not yet fallen out
  BlockTable table_;
};

}  // namespace kv
