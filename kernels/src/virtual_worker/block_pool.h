// The paged KV cache of one worker: engine/block_pool.py, whose docstring has the rules. Memory
// grows with the blocks ever used: 20 bytes a block and 4 for each of 5/4 slots (2 in small pools).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "virtual_worker/cache_groups.h"
#include "virtual_worker/changes.h"
#include "virtual_worker/host_tier.h"

namespace kv::engine {

class BlockPool {
 public:
  struct Run {
    bool has_parent;
    std::uint64_t parent;
    std::vector<std::uint64_t> hashes;
  };

  BlockPool(std::uint32_t blocks, std::uint32_t host_blocks, GroupBlocks groups, ChangeLog& log);

  // What is evicted goes there.
  HostTier& host() { return host_; }
  const HostTier& host() const { return host_; }

  std::uint32_t blocks() const { return blocks_; }
  std::uint32_t available() const { return blocks_ - held_; }
  std::uint32_t used() const { return held_; }
  std::uint64_t epoch() const { return epoch_; }
  std::uint64_t evicted() const { return evicted_; }

  // Leading visible blocks of `chain`. O(log n): who is resident has a resident parent.
  std::size_t hit(Chain chain) const;

  // Windows and states that the model caches beside full attention; none of a dense one.
  const GroupBlocks& groups() const { return groups_; }

  // Leading blocks of `chain` that a request need not compute.
  std::size_t reusable(Chain chain) const {
    return groups_ ? groups_.longest(chain, hit(chain)) : hit(chain);
  }

  // Keeps the windows and states behind the first `end` blocks of `chain`, if there is room.
  void keep_end(Chain chain, std::size_t end);

  // What is kept there is used now.
  void touch_end(Chain chain, std::size_t end) { groups_.touch(chain, end, ++stamp_); }

  // Blocks that `allocate` could still give after acquiring `hit` of `chain`. O(log n).
  std::size_t available_beyond(Chain chain, std::size_t hit) const;

  // Holds the blocks of `chain`, all visible, and appends their ids. Throws std::runtime_error
  // for a chain whose hashes stand for another prefix elsewhere.
  void acquire(Chain chain, std::vector<BlockId>& ids);

  // Holds `count` private blocks, evicting the oldest idle ones; false if there are fewer.
  bool allocate(std::size_t count, std::vector<BlockId>& ids);

  // Makes computed private blocks visible as `chain[start:start + ids.size()]`, whose earlier
  // blocks the caller holds, the last of them as `parent`. Changes `ids` to those to hold on to.
  void publish(std::span<BlockId> ids, Chain chain, std::size_t start, BlockId parent);

  // Lets go of one chain's blocks, given first block first.
  void release(std::span<const BlockId> ids);

  void clear();

  // The visible contents, parents first; where the tree forks, smallest hash first.
  std::vector<Run> snapshot() const;

  // What is wrong, or nothing. O(blocks).
  std::string check() const;

  static constexpr BlockId kNone = 0xFFFFFFFF;  // no block: start of a prompt, end of a list

 private:
  // `parent`: id, kNone at the start of a prompt, kPrivate if the block is not visible.
  // Held: `link` is kHeld and `count` counts references. Idle: both link the idle queue, older
  // first. Free: `link` is the next free block.
  struct Block {
    std::uint32_t low, high;  // of the chain hash; two words, or padding would cost four bytes
    BlockId parent;
    std::uint32_t count;
    BlockId link;

    std::uint64_t hash() const { return std::uint64_t{high} << 32 | low; }
    void set_hash(std::uint64_t hash) {
      low = static_cast<std::uint32_t>(hash);
      high = static_cast<std::uint32_t>(hash >> 32);
    }
    bool held() const { return link == kHeld; }
    bool visible() const { return parent != kPrivate; }
  };
  static constexpr BlockId kPrivate = 0xFFFFFFFE;
  static constexpr BlockId kHeld = 0xFFFFFFFD;
  static constexpr std::uint32_t kEmpty = 0xFFFFFFFF;

  // Slots hold an id and, in the bits above, a piece of the hash that spares most look-ups.
  std::size_t slots_for(std::size_t entries) const;
  std::size_t home(std::uint64_t mixed) const;
  std::uint32_t packed(std::uint64_t mixed, BlockId id) const;
  BlockId find(std::uint64_t hash) const;
  void insert(std::uint64_t hash, BlockId id);
  void erase(BlockId id);
  void grow_table();

  BlockId take_free();
  void give_free(BlockId id);
  void hold_visible(BlockId id);
  void queue_idle(BlockId id);
  void leave_idle(BlockId id);
  void evict(std::size_t count);
  void evict_by_age(std::size_t count);
  void log_stored(Chain chain, std::size_t first, std::size_t end);

  std::uint32_t blocks_;
  ChangeLog& log_;
  HostTier host_;
  GroupBlocks groups_;
  std::uint64_t stamp_ = 0;            // counts uses, where there are groups
  std::vector<std::uint64_t> stamps_;  // of idle blocks, by id; empty without groups
  std::uint32_t id_mask_;
  std::vector<Block> block_;  // as many as were ever used
  std::vector<std::uint32_t> table_;
  std::size_t visible_ = 0;
  BlockId free_ = kNone;         // first of the used and freed
  BlockId oldest_ = kNone;       // of the idle queue
  BlockId newest_ = kNone;
  std::uint32_t held_ = 0;
  std::uint32_t idle_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace kv::engine
