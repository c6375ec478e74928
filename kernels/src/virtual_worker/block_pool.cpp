#include "virtual_worker/block_pool.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace kv::engine {

BlockPool::BlockPool(std::uint32_t blocks, std::uint32_t host_blocks, GroupBlocks groups,
                     ChangeLog& log)
    : blocks_(blocks),
      log_(log),
      host_(host_blocks),
      groups_(std::move(groups)),
      id_mask_(std::bit_ceil(blocks + 1) - 1),
      table_(16, kEmpty) {
  for (std::size_t number = 1; number <= groups_.size(); ++number) {
    log_.stored(nullptr, {}, number);  // there is such a group, before it holds anything
  }
}

std::size_t BlockPool::hit(Chain chain) const {
  std::size_t low = 0;
  std::size_t high = chain.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (find(chain[middle]) != kNone) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

std::size_t BlockPool::available_beyond(Chain chain, std::size_t hit) const {
  // Whoever holds a block holds its prefix: the idle ones are the tail of the hit.
  std::size_t low = 0;
  std::size_t high = hit;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    const BlockId id = find(chain[middle]);
    if (id != kNone && block_[id].held()) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const std::size_t idle_hits = hit - low;
  return available() >= idle_hits ? available() - idle_hits : 0;
}

void BlockPool::acquire(Chain chain, std::vector<BlockId>& ids) {
  for (const std::uint64_t hash : chain) {
    const BlockId id = find(hash);
    if (id == kNone) {
      throw std::runtime_error("chain hash " + std::to_string(hash) +
                               " is cached only behind another prefix: chains must name prefixes");
    }
    hold_visible(id);
    ids.push_back(id);
  }
}

bool BlockPool::allocate(std::size_t count, std::vector<BlockId>& ids) {
  if (count > available()) return false;
  const std::size_t free = available() - idle_ - groups_.blocks();
  if (count > free) groups_ ? evict_by_age(count - free) : evict(count - free);
  for (std::size_t i = 0; i < count; ++i) {
    const BlockId id = take_free();
    block_[id] = {0, 0, kPrivate, 1, kHeld};
    ids.push_back(id);
  }
  held_ += static_cast<std::uint32_t>(count);
  return true;
}

void BlockPool::publish(std::span<BlockId> ids, Chain chain, std::size_t start, BlockId parent) {
  if (parent != kNone && !block_[parent].visible()) {
    throw std::logic_error("the parent of published blocks is not visible");
  }
  std::size_t first = start;  // of the run that became visible
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Block& own = block_[ids[i]];
    if (own.visible() || own.count != 1) throw std::logic_error("a published block is not private");
    const std::uint64_t hash = chain[start + i];
    const BlockId twin = find(hash);
    if (twin == kNone) {
      own.set_hash(hash);
      own.parent = parent;
      insert(hash, ids[i]);
    } else {
      log_stored(chain, first, start + i);
      first = start + i + 1;
      give_free(ids[i]);
      --held_;
      hold_visible(twin);
      ids[i] = twin;
    }
    parent = ids[i];
  }
  log_stored(chain, first, start + ids.size());
}

void BlockPool::release(std::span<const BlockId> ids) {
  for (std::size_t i = ids.size(); i-- > 0;) {
    Block& block = block_[ids[i]];
    if (--block.count != 0) continue;
    --held_;
    if (block.visible()) {
      queue_idle(ids[i]);
    } else {
      give_free(ids[i]);
    }
  }
}

void BlockPool::clear() {
  for (BlockId id = oldest_; id != kNone;) {
    const BlockId next = block_[id].link;
    block_[id].parent = kPrivate;
    give_free(id);
    id = next;
  }
  for (const GroupBlocks::Kept& kept : groups_.kept()) {
    for (const BlockId id : kept.ids) give_free(id);
  }
  groups_.clear();
  for (Block& block : block_) block.parent = kPrivate;
  std::fill(table_.begin(), table_.end(), kEmpty);
  oldest_ = newest_ = kNone;
  idle_ = 0;
  visible_ = 0;
  host_.clear();
  ++epoch_;
  log_.cleared();
}

BlockId BlockPool::take_free() {
  if (free_ == kNone) {
    // Past the last one ever used. Growth by half, or the last doubling would waste a third.
    if (block_.size() == block_.capacity()) {
      block_.reserve(std::min<std::size_t>(blocks_, block_.size() + block_.size() / 2 + 16));
    }
    block_.push_back({0, 0, kPrivate, 0, kNone});
    return static_cast<BlockId>(block_.size() - 1);
  }
  const BlockId id = free_;
  free_ = block_[id].link;
  return id;
}

void BlockPool::give_free(BlockId id) {
  block_[id] = {0, 0, kPrivate, 0, free_};
  free_ = id;
}

void BlockPool::hold_visible(BlockId id) {
  Block& block = block_[id];
  if (block.held()) {
    ++block.count;
    return;
  }
  leave_idle(id);
  block.count = 1;
  block.link = kHeld;
  ++held_;
}

void BlockPool::queue_idle(BlockId id) {
  block_[id].count = newest_;
  block_[id].link = kNone;
  (newest_ == kNone ? oldest_ : block_[newest_].link) = id;
  newest_ = id;
  ++idle_;
  if (!groups_) return;
  if (stamps_.size() <= id) stamps_.resize(block_.size());
  stamps_[id] = ++stamp_;
}

void BlockPool::leave_idle(BlockId id) {
  const BlockId older = block_[id].count;
  const BlockId newer = block_[id].link;
  (older == kNone ? oldest_ : block_[older].link) = newer;
  (newer == kNone ? newest_ : block_[newer].count) = older;
  --idle_;
}

void BlockPool::evict(std::size_t count) {
  std::vector<std::uint64_t> gone;
  gone.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const BlockId id = oldest_;
    gone.push_back(block_[id].hash());
    leave_idle(id);
    erase(id);
    give_free(id);
  }
  if (host_.blocks() != 0) host_.keep(gone, log_);
  log_.removed(count);
  for (const std::uint64_t hash : gone) log_.hash(hash);
  evicted_ += count;
}

// Of all groups, what was used longest ago goes first.
void BlockPool::evict_by_age(std::size_t count) {
  std::vector<std::pair<std::size_t, std::vector<std::uint64_t>>> gone;  // group, hashes
  const auto note = [&gone](std::size_t group, std::uint64_t hash) {
    if (gone.empty() || gone.back().first != group) gone.push_back({group, {}});
    gone.back().second.push_back(hash);
  };
  for (std::size_t freed = 0; freed < count;) {
    const auto& kept = groups_.kept();
    const BlockId id = oldest_;
    if (kept.empty() || (id != kNone && stamps_[id] < kept.front().stamp)) {
      note(0, block_[id].hash());
      leave_idle(id);
      erase(id);
      give_free(id);
      ++freed;
      ++evicted_;
      continue;
    }
    const GroupBlocks::Kept first = groups_.pop();
    note(first.group + 1, first.hash);
    for (const BlockId own : first.ids) give_free(own);
    freed += first.ids.size();
    evicted_ += first.ids.size();
  }
  for (const auto& [group, hashes] : gone) {
    log_.removed(hashes.size(), group);
    for (const std::uint64_t hash : hashes) log_.hash(hash);
  }
}

void BlockPool::keep_end(Chain chain, std::size_t end) {
  const auto missing = groups_.touch(chain, end, ++stamp_);
  std::size_t cost = 0;
  for (const auto& needed : missing) cost += groups_.group(needed.group).cost;
  std::vector<BlockId> ids;
  if (!allocate(cost, ids)) return;
  held_ -= static_cast<std::uint32_t>(cost);  // nobody holds them
  for (const BlockId id : ids) block_[id] = {0, 0, kPrivate, 0, kNone};
  ++stamp_;
  auto own = ids.cbegin();
  for (std::size_t i = 0; i < missing.size();) {
    const auto& [group, last] = missing[i];  // of a run that is listed from its end
    std::size_t first = last + 1;
    for (; i < missing.size() && missing[i].group == group && missing[i].at + 1 == first; ++i) {
      const auto next = own + groups_.group(group).cost;
      groups_.keep({group, chain[--first], stamp_, {own, next}});
      own = next;
    }
    const std::uint64_t* parent = first == 0 ? nullptr : &chain[first - 1];
    log_.stored(parent, chain.subspan(first, last + 1 - first), group + 1);
  }
}

void BlockPool::log_stored(Chain chain, std::size_t first, std::size_t end) {
  if (first == end) return;
  log_.stored(first == 0 ? nullptr : &chain[first - 1], chain.subspan(first, end - first));
}

}  // namespace kv::engine
