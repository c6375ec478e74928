// What the windows and states of one pool hold: engine/cache_groups.py, whose docstrings have the
// rules. Lifetime: worker.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kv::engine {

using BlockId = std::uint32_t;
using Chain = std::span<const std::uint64_t>;

// Layers that need a part of a prompt. One block of theirs takes `cost` blocks of the pool.
struct CacheGroup {
  std::uint32_t window;  // tokens; 0: a state
  std::uint32_t cost;

  // How many blocks before `end` a prefix of `end` blocks needs of it.
  std::size_t needed(std::size_t end, std::int64_t block_size) const;
  // Blocks of the pool that it takes for a running request of so many blocks.
  std::size_t working(std::size_t blocks, std::int64_t block_size) const;
};

class GroupBlocks {
 public:
  // A block that a prefix needs: its group, counted from 0, and its position in the chain.
  struct Needed {
    std::size_t group, at;
  };
  // One block of a window, or one state.
  struct Kept {
    std::size_t group;
    std::uint64_t hash;
    std::uint64_t stamp;  // of its last use, on the pool's own count
    std::vector<BlockId> ids;
  };

  GroupBlocks(std::vector<CacheGroup> groups, std::int64_t block_size);

  explicit operator bool() const { return !groups_.empty(); }
  std::size_t size() const { return groups_.size(); }
  std::uint32_t blocks() const { return blocks_; }  // of the pool, that they take
  // Blocks of the pool that a running request takes; without an argument, at most.
  std::size_t working(std::size_t blocks = std::size_t{1} << 24) const;
  const CacheGroup& group(std::size_t number) const { return groups_[number]; }
  const std::list<Kept>& kept() const { return kept_; }  // oldest first

  // The greatest number of leading blocks, at most `hit`, that all groups let it reuse.
  std::size_t longest(Chain chain, std::size_t hit) const;
  // What is kept behind the first `end` blocks is used now; the others of those are missing.
  std::vector<Needed> touch(Chain chain, std::size_t end, std::uint64_t stamp);
  void keep(Kept kept);
  Kept pop();  // the one that goes first
  void clear();

 private:
  using Place = std::list<Kept>::iterator;

  // Calls see(needed) for what all groups need of `end` blocks, the last first, until it says no.
  template <class See>
  bool each_needed(std::size_t end, See see) const {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      const std::size_t count = groups_[group].needed(end, block_size_);
      for (std::size_t at = end; at-- > end - count;) {
        if (!see(Needed{group, at})) return false;
      }
    }
    return true;
  }

  std::vector<CacheGroup> groups_;
  std::int64_t block_size_;
  std::uint32_t blocks_ = 0;
  std::list<Kept> kept_;
  std::vector<std::unordered_map<std::uint64_t, Place>> by_hash_;  // of each group
};

}  // namespace kv::engine
