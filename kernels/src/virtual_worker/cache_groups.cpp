#include "virtual_worker/cache_groups.h"

#include <algorithm>

namespace kv::engine {

std::size_t CacheGroup::needed(std::size_t end, std::int64_t block_size) const {
  if (window == 0) return std::min<std::size_t>(1, end);
  const std::int64_t tokens = std::int64_t{window} - 1;
  return std::min(end, static_cast<std::size_t>((tokens + block_size - 1) / block_size));
}

std::size_t CacheGroup::working(std::size_t blocks, std::int64_t block_size) const {
  const std::size_t own = window == 0 ? 1 : needed(blocks, block_size) + 1;
  return cost * std::min(own, blocks);
}

GroupBlocks::GroupBlocks(std::vector<CacheGroup> groups, std::int64_t block_size)
    : groups_(std::move(groups)), block_size_(block_size), by_hash_(groups_.size()) {}

std::size_t GroupBlocks::working(std::size_t blocks) const {
  std::size_t sum = 0;
  for (const CacheGroup& group : groups_) sum += group.working(blocks, block_size_);
  return sum;
}

std::size_t GroupBlocks::longest(Chain chain, std::size_t hit) const {
  for (std::size_t end = hit; end > 0; --end) {
    const bool all = each_needed(end, [&](const Needed& needed) {
      return by_hash_[needed.group].contains(chain[needed.at]);
    });
    if (all) return end;
  }
  return 0;
}

std::vector<GroupBlocks::Needed> GroupBlocks::touch(Chain chain, std::size_t end,
                                                    std::uint64_t stamp) {
  std::vector<Needed> missing;
  each_needed(end, [&](const Needed& needed) {
    const auto found = by_hash_[needed.group].find(chain[needed.at]);
    if (found == by_hash_[needed.group].end()) {
      missing.push_back(needed);
    } else {
      found->second->stamp = stamp;
      kept_.splice(kept_.end(), kept_, found->second);
    }
    return true;
  });
  return missing;
}

void GroupBlocks::keep(Kept kept) {
  blocks_ += static_cast<std::uint32_t>(kept.ids.size());
  kept_.push_back(std::move(kept));
  by_hash_[kept_.back().group][kept_.back().hash] = std::prev(kept_.end());
}

GroupBlocks::Kept GroupBlocks::pop() {
  Kept kept = std::move(kept_.front());
  kept_.pop_front();
  by_hash_[kept.group].erase(kept.hash);
  blocks_ -= static_cast<std::uint32_t>(kept.ids.size());
  return kept;
}

void GroupBlocks::clear() {
  kept_.clear();
  for (auto& hashes : by_hash_) hashes.clear();
  blocks_ = 0;
}

}  // namespace kv::engine
