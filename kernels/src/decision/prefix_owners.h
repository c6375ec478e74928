// Who uses a block: one owner, or several. Where prompts of different owners part, and whose a
// prompt is that names no owner, is read off it. Every public member may be called from any thread.
//
// What a chain's block is used by, the blocks before it are used by too, so along a chain come
// first the shared blocks, then those of one owner, then unknown ones; both ends are found by
// bisection, and a claim of a conversation's next turn visits its new blocks only. Eviction can
// punch holes. A bisection that meets one takes it for an end, so that what it finds is at most
// the truth; a claim visits all blocks behind it and fills it with what they tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/prefetch.h"

namespace kv {

class PrefixOwners {
 public:
  using Hashes = std::span<const std::uint64_t>;

  static constexpr std::int64_t kMostOwner = (std::int64_t{1} << 61) - 1;

  struct Owned {
    std::int64_t owner;  // -1: several own the block, or nothing is known
    std::size_t depth;   // in blocks
  };

  // Takes its memory at once, so that no call pauses to lay it out anew. Throws
  // std::invalid_argument unless max_entries is 1..2^28.
  explicit PrefixOwners(std::int64_t max_entries);

  // Marks the chain as used by the owner (0..kMostOwner). Returns how many leading blocks are used
  // by two or more.
  std::size_t claim(Hashes chain, std::int64_t owner);

  // How many leading blocks are used by two owners or more.
  std::size_t shared(Hashes chain) const;

  // The owner of the deepest known block.
  Owned owner(Hashes chain) const;

  std::size_t size() const;
  std::uint64_t evicted() const;
  std::size_t max_entries() const { return entries_.size(); }
  std::size_t memory_bytes() const;

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint64_t word;  // owner, and in the lowest two bits its warmth
  };
  struct Ends {
    std::size_t shared;  // blocks
    std::size_t known;
  };
  // A walk from a chain's end towards its start: who uses the block, given the ones behind it.
  struct Walk {
    std::uint64_t users;
    std::size_t shared;  // end of the shared blocks met, 0: none
  };

  KV_PREFETCHES void prefetch(std::uint64_t hash) const { prefetch_line(&slots_[home(hash)]); }
  std::size_t home(std::uint64_t hash) const;
  std::size_t next(std::size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
  const Entry* find(std::uint64_t hash) const;
  template <typename Holds>
  std::size_t first_without(Hashes chain, std::size_t from, std::size_t to, Holds holds) const;
  Ends ends(Hashes chain) const;
  bool cooled(std::uint64_t hash) const;
  void settle(Hashes chain, std::size_t from, std::size_t to, Walk& walk);
  void insert(std::uint64_t hash, std::uint64_t users);
  std::size_t coldest();
  void unlink(std::size_t place);

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;        // in the order they came; the clock's hand goes along it
  std::vector<std::uint64_t> slots_;  // high half of the mixed hash, then the entry's place + 1
  std::size_t size_ = 0;
  std::size_t hand_ = 0;
  std::size_t looks_ = 1;  // what the hand may still look at in this claim
  std::uint64_t evicted_ = 0;
};

}  // namespace kv
