// The pool's table from chain hash to block, its listing and its self-check.
#include <algorithm>
#include <tuple>

#include "virtual_worker/block_pool.h"

namespace kv::engine {
namespace {

// Chain hashes are uniform, but callers may name blocks as they like (small numbers, say).
std::uint64_t mix(std::uint64_t hash) {
  hash *= 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 32);
}


}  // namespace

// Half full, where memory does not count: few followers to look at when one is erased. Large pools
// are at most 4/5 full: a miss then looks at 13 slots of a line or two, hardly ever at a block.
std::size_t BlockPool::slots_for(std::size_t entries) const {
  constexpr std::uint32_t kManyBlocks = 32768;
  return entries + (blocks_ > kManyBlocks ? entries / 4 : entries) + 2;
}

std::size_t BlockPool::home(std::uint64_t mixed) const {
  return static_cast<std::size_t>((static_cast<unsigned __int128>(mixed) * table_.size()) >> 64);
}

std::uint32_t BlockPool::packed(std::uint64_t mixed, BlockId id) const {
  return (static_cast<std::uint32_t>(mixed) & ~id_mask_) | id;
}

BlockId BlockPool::find(std::uint64_t hash) const {
  const std::uint64_t mixed = mix(hash);
  const std::uint32_t tag = static_cast<std::uint32_t>(mixed) & ~id_mask_;
  for (std::size_t slot = home(mixed);; slot = slot + 1 == table_.size() ? 0 : slot + 1) {
    const std::uint32_t entry = table_[slot];
    if (entry == kEmpty) return kNone;
    if ((entry & ~id_mask_) == tag && block_[entry & id_mask_].hash() == hash) {
      return entry & id_mask_;
    }
  }
}

void BlockPool::insert(std::uint64_t hash, BlockId id) {
  if (slots_for(visible_ + 1) > table_.size()) grow_table();
  const std::uint64_t mixed = mix(hash);
  std::size_t slot = home(mixed);
  while (table_[slot] != kEmpty) slot = slot + 1 == table_.size() ? 0 : slot + 1;
  table_[slot] = packed(mixed, id);
  ++visible_;
}

void BlockPool::erase(BlockId id) {
  const std::uint64_t mixed = mix(block_[id].hash());
  const std::uint32_t entry = packed(mixed, id);
  const std::size_t slots = table_.size();
  std::size_t hole = home(mixed);
  while (table_[hole] != entry) hole = hole + 1 == slots ? 0 : hole + 1;
  for (std::size_t at = hole;;) {
    at = at + 1 == slots ? 0 : at + 1;
    if (table_[at] == kEmpty) break;
    // A follower may move into the hole unless its home lies after the hole.
    const std::size_t start = home(mix(block_[table_[at] & id_mask_].hash()));
    const std::size_t from_home = at >= start ? at - start : at + slots - start;
    const std::size_t from_hole = at >= hole ? at - hole : at + slots - hole;
    if (from_home < from_hole) continue;
    table_[hole] = table_[at];
    hole = at;
  }
  table_[hole] = kEmpty;
  --visible_;
}

void BlockPool::grow_table() {
  std::vector<std::uint32_t> old(
      std::min(slots_for(blocks_), table_.size() + table_.size() / 2), kEmpty);
  old.swap(table_);
  for (const std::uint32_t entry : old) {
    if (entry == kEmpty) continue;
    std::size_t slot = home(mix(block_[entry & id_mask_].hash()));
    while (table_[slot] != kEmpty) slot = slot + 1 == table_.size() ? 0 : slot + 1;
    table_[slot] = entry;
  }
}

std::vector<BlockPool::Run> BlockPool::snapshot() const {
  // Children side by side, largest hash first, so that a stack gives the smallest first.
  std::vector<std::tuple<BlockId, std::uint64_t, BlockId>> children;  // parent, ~hash, id
  children.reserve(visible_);
  for (BlockId id = 0; id < block_.size(); ++id) {
    if (block_[id].visible()) children.emplace_back(block_[id].parent, ~block_[id].hash(), id);
  }
  std::sort(children.begin(), children.end());
  std::vector<BlockId> starts;
  const auto push_children = [&](BlockId parent) {
    auto at = std::lower_bound(children.begin(), children.end(), std::tuple(parent, 0ULL, 0U));
    const std::size_t before = starts.size();
    for (; at != children.end() && std::get<0>(*at) == parent; ++at) {
      starts.push_back(std::get<2>(*at));
    }
    return starts.size() > before;
  };
  std::vector<Run> runs;
  push_children(kNone);
  while (!starts.empty()) {
    const BlockId parent = block_[starts.back()].parent;
    Run run{parent != kNone, parent == kNone ? 0 : block_[parent].hash(), {}};
    do {
      const BlockId id = starts.back();
      starts.pop_back();
      run.hashes.push_back(block_[id].hash());
      if (!push_children(id)) break;
    } while (true);
    runs.push_back(std::move(run));
  }
  return runs;
}

std::string BlockPool::check() const {
  std::size_t free = blocks_ - block_.size();
  for (BlockId id = free_; id != kNone; id = block_[id].link) {
    if (block_[id].visible()) return "a free block is visible";
    if (++free > blocks_) return "the free list has a loop";
  }
  std::size_t idle = 0;
  std::vector<std::size_t> rank(block_.size(), 0);  // in the idle queue, from 1
  for (BlockId id = oldest_; id != kNone; id = block_[id].link) {
    if (++idle > idle_) return "the idle queue has a loop";
    if (!block_[id].visible()) return "an idle block has no content";
    rank[id] = idle;
  }
  std::size_t held = 0;
  std::size_t visible = 0;
  for (BlockId id = 0; id < block_.size(); ++id) {
    const Block& block = block_[id];
    if (block.held()) {
      ++held;
      if (block.count == 0) return "a held block has no reference";
    }
    if (!block.visible()) continue;
    ++visible;
    if (find(block.hash()) != id) return "a visible block is not found";
    if (block.parent == kNone) continue;
    const Block& parent = block_[block.parent];
    if (!parent.visible()) return "a block outlived its parent";
    if (!parent.held() && (block.held() || rank[id] >= rank[block.parent])) {
      return "a parent would go first";
    }
  }
  if (held != held_ || idle != idle_) return "counts of held or idle blocks are wrong";
  std::size_t kept = 0;
  for (const GroupBlocks::Kept& one : groups_.kept()) kept += one.ids.size();
  if (kept != groups_.blocks()) return "blocks of groups are miscounted";
  if (free + idle + held + kept != blocks_) return "a block was lost";
  if (visible != visible_) return "the count of visible blocks is wrong";
  return host_.check();
}

}  // namespace kv::engine
