// What workers hold that tell nothing of their caches: each a Recency, all of them over one
// PrefixIndex, so that a lookup over all workers is one pass. Every public member may be called
// from any thread; one lock serves them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "index/prefix_index.h"
#include "mirror/recency.h"

namespace kv {

class Mirror {
 public:
  using Hashes = Recency::Hashes;

  struct Touch {
    std::uint64_t stamp;
    Recency::Met met;
  };

  // Throws std::invalid_argument as PrefixIndex does. At most `max_blocks` are remembered of all
  // workers together.
  Mirror(std::int64_t workers, std::int64_t max_blocks);

  // Bounds of one worker: blocks resident, and blocks remembered; both 0 at first. Returns how
  // many are resident no more. Throws std::invalid_argument unless 0 <= resident <= remembered
  // and `max_blocks` suffices for what all workers may remember; as all that follow throw
  // std::out_of_range for a worker there is not.
  std::size_t resize(std::int64_t worker, std::int64_t resident, std::int64_t remembered);

  // The worker is about to use the chain, or has done so. Returns what was there of it.
  Touch touch(std::int64_t worker, Hashes chain);

  // The touch that gave `stamp` came to nothing: what it brought, and nobody used since, goes.
  std::size_t forget(std::int64_t worker, Hashes chain, std::uint64_t stamp);

  // The worker no longer holds what it used at `stamp` last, or before. Returns how many went.
  std::size_t drop_colder(std::int64_t worker, std::uint64_t stamp);

  // The worker still holds what it used after `stamp`, as far as its bound reaches. Returns how
  // many came back.
  std::size_t revive_warmer(std::int64_t worker, std::uint64_t stamp);

  // The worker holds nothing and nothing is remembered; its bounds stay. Returns how many it held.
  std::size_t clear_worker(std::int64_t worker);

  // Writes to hits[0..workers) how many leading blocks of the chain are resident on each.
  void longest_prefix(Hashes chain, std::int32_t* hits);

  // The same, but raises what is in hits[0..workers): it stays where it is not less.
  void raise_prefix(Hashes chain, std::int32_t* hits);

  std::size_t held(std::int64_t worker) const;
  std::size_t remembered(std::int64_t worker) const;
  std::size_t size() const;
  std::size_t memory_bytes() const;
  std::size_t workers() const { return workers_.size(); }
  std::size_t max_blocks() const { return max_blocks_; }

 private:
  std::size_t checked(std::int64_t worker) const;
  // Brings the index up to date with what changed of a worker; how many went.
  std::size_t publish(std::int64_t worker);

  mutable std::mutex mutex_;
  std::size_t max_blocks_;
  std::size_t promised_ = 0;  // sum of what workers may remember
  std::uint64_t stamp_ = 0;
  PrefixIndex index_;
  std::vector<Recency> workers_;
  std::vector<std::uint64_t> fresh_;  // scratch: blocks that came to be resident
  std::vector<std::uint64_t> left_;   // scratch: blocks that no longer are
};

}  // namespace kv
