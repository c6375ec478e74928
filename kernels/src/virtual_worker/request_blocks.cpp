#include "virtual_worker/request_blocks.h"

#include <algorithm>
#include <stdexcept>

namespace kv::engine {

Chain RequestBlocks::cacheable(const Request& request) const {
  const Chain chain = request.chain();
  const auto limit = static_cast<std::size_t>((request.total_tokens() - 1) / block_size_);
  return chain.first(std::min(chain.size(), limit));
}

std::size_t RequestBlocks::hit(const Request& request) const {
  return pool_.reusable(cacheable(request));
}

std::size_t RequestBlocks::host_hit(const Request& request, std::size_t hit) const {
  return request.imports ? 0 : pool_.host().hit(cacheable(request), hit);
}

bool RequestBlocks::fits(const Request& request, std::size_t hit, std::size_t spare_blocks) const {
  const std::size_t need = blocks_for(request.total_tokens()) - hit + working(request);
  return need + spare_blocks <= pool_.available_beyond(request.chain(), hit);
}

void RequestBlocks::start(Request& request, std::size_t hit, std::size_t host_hit) {
  request.host_blocks = host_hit;
  pool_.host().pin(request.chain().subspan(hit, host_hit));  // what is evicted comes there
  const std::size_t all = blocks_for(request.total_tokens());
  request.blocks.reserve(all + 1);
  if (pool_.groups()) {
    plan_ends(request, hit);
    pool_.touch_end(request.chain(), hit);
  }
  pool_.acquire(request.chain().first(hit), request.blocks);
  const std::size_t beside = working(request);
  if (!pool_.allocate(all - hit + beside, request.blocks)) {
    throw std::logic_error("a request was admitted without room");
  }
  if (beside != 0) {
    const auto first = request.blocks.end() - static_cast<std::ptrdiff_t>(beside);
    request.group_blocks.assign(first, request.blocks.end());
    request.blocks.erase(first, request.blocks.end());
  }
  request.visible_blocks = hit;
  request.computed_tokens = static_cast<std::int64_t>(hit) * block_size_;
  request.prefill_target = request.total_tokens();
  request.epoch = pool_.epoch();
  mark(request);
}

void RequestBlocks::end_load(Request& request) {
  if (request.host_blocks != 0 && request.epoch == pool_.epoch()) {
    pool_.host().unpin(request.chain().subspan(request.visible_blocks, request.host_blocks));
  }
  request.host_blocks = 0;
}

void RequestBlocks::publish(Request& request) {
  const std::size_t start = request.visible_blocks;
  const auto stop = static_cast<std::size_t>(request.computed_tokens / block_size_);
  // A prefill computed before a clear may rest on what the clear was meant to drop.
  if (stop == start || request.epoch != pool_.epoch()) return;
  unmark(request);
  request.extend_chain(stop);
  const BlockId parent = start == 0 ? BlockPool::kNone : request.blocks[start - 1];
  pool_.publish(std::span(request.blocks).subspan(start, stop - start), request.chain(), start,
                parent);
  request.visible_blocks = stop;
  while (!request.ends.empty() && request.ends.front() <= stop) {
    const std::size_t end = drop_end(request);
    pool_.keep_end(request.chain(), end);
  }
  mark(request);
}

void RequestBlocks::leave(Request& request) {
  end_load(request);
  unmark(request);
  pool_.release(request.blocks);
  request.blocks.clear();
  if (pool_.groups()) leave_groups(request);
  request.visible_blocks = 0;
  request.computed_tokens = request.prefill_target = 0;
}

std::int64_t RequestBlocks::in_flight_tokens(const Request& request, std::size_t hit) const {
  const Chain mine = request.chain();
  if (pool_.groups()) return ends_in_flight_tokens(request, hit);
  if (hit == mine.size() || frontier_.empty()) return 0;
  const auto found = frontier_.find(mine[hit]);
  if (found == frontier_.end() || found->second->epoch != pool_.epoch()) return 0;
  const Request& owner = *found->second;
  const Chain theirs = owner.chain();
  const auto target = static_cast<std::size_t>(owner.prefill_target / block_size_);
  // Equal chain hashes mean equal prefixes, so the common part can be bisected.
  std::size_t common = 0;
  std::size_t high = std::min({mine.size(), theirs.size(), target});
  while (common < high) {
    const std::size_t middle = (common + high) / 2;
    if (mine[middle] == theirs[middle]) {
      common = middle + 1;
    } else {
      high = middle;
    }
  }
  return (static_cast<std::int64_t>(common) - static_cast<std::int64_t>(hit)) * block_size_;
}

// As `in_flight_tokens` where windows and states are kept at ends alone.
std::int64_t RequestBlocks::ends_in_flight_tokens(const Request& request, std::size_t hit) const {
  const Chain chain = cacheable(request);
  std::size_t best = hit;
  for (const auto& [hash, leaves] : ends_in_flight_) {
    const auto& [end, owner] = leaves;
    const bool is_usable = best < end && end <= chain.size() && chain[end - 1] == hash;
    if (is_usable && owner->epoch == pool_.epoch()) best = end;
  }
  return (static_cast<std::int64_t>(best) - static_cast<std::int64_t>(hit)) * block_size_;
}

// Beyond its `hit` blocks, where it parts from what full attention has of it, and its last block
// that a repeat need not compute.
void RequestBlocks::plan_ends(Request& request, std::size_t hit) {
  const std::size_t parts = pool_.hit(cacheable(request));
  const std::size_t own = own_end(request);
  request.ends.clear();
  for (const std::size_t end : {std::min(parts, own), std::max(parts, own)}) {
    if (end <= hit || (!request.ends.empty() && request.ends.back() == end)) continue;
    request.ends.push_back(end);
    ends_in_flight_[request.chain()[end - 1]] = {end, &request};
  }
}

// The first of its ends is reached, or never will be.
std::size_t RequestBlocks::drop_end(Request& request) {
  const std::size_t end = request.ends.front();
  request.ends.erase(request.ends.begin());
  const auto found = ends_in_flight_.find(request.chain()[end - 1]);
  if (found != ends_in_flight_.end() && found->second.second == &request) {
    ends_in_flight_.erase(found);
  }
  return end;
}

// Gives back what its windows and states took; what they left at its end is used now.
void RequestBlocks::leave_groups(Request& request) {
  pool_.release(request.group_blocks);
  if (!request.group_blocks.empty()) pool_.touch_end(request.chain(), own_end(request));
  while (!request.ends.empty()) drop_end(request);
  request.group_blocks.clear();
}

void RequestBlocks::mark(Request& request) {
  if (request.prefilling() && request.visible_blocks < request.known_blocks) {
    frontier_[request.names[request.visible_blocks]] = &request;
  }
}

void RequestBlocks::unmark(const Request& request) {
  if (request.visible_blocks >= request.known_blocks || frontier_.empty()) return;
  const auto found = frontier_.find(request.names[request.visible_blocks]);
  if (found != frontier_.end() && found->second == &request) frontier_.erase(found);
}

}  // namespace kv::engine
