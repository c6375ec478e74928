#include "virtual_worker/host_tier.h"

#include <stdexcept>

namespace kv::engine {

std::size_t HostTier::hit(Chain chain, std::size_t start) const {
  if (by_hash_.empty() || start >= chain.size()) return 0;
  std::size_t low = start;
  std::size_t high = chain.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (by_hash_.contains(chain[middle])) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - start;
}

void HostTier::pin(Chain hashes) {
  for (std::size_t i = hashes.size(); i-- > 0;) {
    const auto found = by_hash_.find(hashes[i]);
    if (found == by_hash_.end()) throw std::runtime_error("chains must name prefixes");
    unlink(found->second);
    append(found->second);
    ++node_[found->second].pins;
  }
}

void HostTier::unpin(Chain hashes) {
  for (const std::uint64_t hash : hashes) --node_[by_hash_.at(hash)].pins;
}

void HostTier::keep(Chain evicted, ChangeLog& log) {
  std::vector<std::uint32_t> fresh;
  for (const std::uint64_t hash : evicted) {
    const auto found = by_hash_.find(hash);
    if (found != by_hash_.end()) {
      unlink(found->second);
      append(found->second);
      continue;
    }
    auto id = static_cast<std::uint32_t>(node_.size());
    if (free_.empty()) {
      node_.push_back({});
    } else {
      id = free_.back();
      free_.pop_back();
    }
    node_[id] = {hash, kNone, kNone, 0, true};
    append(id);
    by_hash_.emplace(hash, id);
    fresh.push_back(id);
  }
  std::vector<std::uint64_t> lost;
  std::vector<std::uint32_t> gone;
  for (std::uint32_t id = oldest_; by_hash_.size() > blocks_;) {
    const std::uint32_t next = node_[id].newer;
    if (node_[id].pins == 0) {
      if (!node_[id].fresh) lost.push_back(node_[id].hash);
      by_hash_.erase(node_[id].hash);
      unlink(id);
      node_[id].fresh = false;
      gone.push_back(id);
    }
    id = next;
  }
  std::vector<std::uint64_t> stored;
  for (const std::uint32_t id : fresh) {
    if (!node_[id].fresh) continue;  // gone again
    node_[id].fresh = false;
    stored.push_back(node_[id].hash);
  }
  free_.insert(free_.end(), gone.begin(), gone.end());
  log.host(ChangeKind::stored_host, stored);
  log.host(ChangeKind::removed_host, lost);
}

void HostTier::clear() {
  node_.clear();
  free_.clear();
  by_hash_.clear();
  oldest_ = newest_ = kNone;
}

std::vector<std::uint64_t> HostTier::contents() const {
  std::vector<std::uint64_t> hashes;
  for (std::uint32_t id = newest_; id != kNone; id = node_[id].older) {
    hashes.push_back(node_[id].hash);
  }
  return hashes;
}

std::string HostTier::check() const {
  if (by_hash_.size() > blocks_) return "the host holds more than it may";
  std::size_t held = 0;
  for (std::uint32_t id = oldest_; id != kNone; id = node_[id].newer) {
    if (++held > by_hash_.size()) return "the host's queue has a loop";
    if (node_[id].fresh) return "a block of the host is marked";
    const auto found = by_hash_.find(node_[id].hash);
    if (found == by_hash_.end() || found->second != id) return "a block of the host is not found";
  }
  if (held != by_hash_.size()) return "a block of the host was lost";
  if (held + free_.size() != node_.size()) return "a place of the host was lost";
  return "";
}

void HostTier::append(std::uint32_t id) {
  node_[id].older = newest_;
  node_[id].newer = kNone;
  (newest_ == kNone ? oldest_ : node_[newest_].newer) = id;
  newest_ = id;
}

void HostTier::unlink(std::uint32_t id) {
  const std::uint32_t older = node_[id].older;
  const std::uint32_t newer = node_[id].newer;
  (older == kNone ? oldest_ : node_[older].newer) = newer;
  (newer == kNone ? newest_ : node_[newer].older) = older;
}

}  // namespace kv::engine
