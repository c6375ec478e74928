// A request's blocks from admission to release, as engine/scheduler/blocks.py has them.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "virtual_worker/block_pool.h"
#include "virtual_worker/request.h"

namespace kv::engine {

class RequestBlocks {
 public:
  RequestBlocks(BlockPool& pool, std::int64_t block_size) : pool_(pool), block_size_(block_size) {}

  // Its leading cached blocks; the last token is always computed.
  std::size_t hit(const Request& request) const;

  // Blocks beyond its `hit` ones that the host has; none for one that reads elsewhere.
  std::size_t host_hit(const Request& request, std::size_t hit) const;

  // Would all its tokens fit, `hit` blocks being cached, and leave `spare_blocks`?
  bool fits(const Request& request, std::size_t hit, std::size_t spare_blocks) const;

  // Holds `hit` cached blocks and reserves the others; `fits` has said that they are there. The
  // `host_hit` blocks after them stay in the host until `end_load`.
  void start(Request& request, std::size_t hit, std::size_t host_hit);

  // Nothing is loaded from the host for it any more.
  void end_load(Request& request);

  bool grow(Request& request) { return pool_.allocate(1, request.blocks); }

  // Shows its full computed blocks, unless the cache was cleared since it started.
  void publish(Request& request);

  // Gives all its blocks back; the published ones stay cached.
  void leave(Request& request);

  // Tokens beyond its `hit` blocks that a running prefill is about to publish.
  std::int64_t in_flight_tokens(const Request& request, std::size_t hit) const;

 private:
  std::size_t blocks_for(std::int64_t tokens) const {
    return static_cast<std::size_t>((tokens + block_size_ - 1) / block_size_);
  }
  Chain cacheable(const Request& request) const;
  std::size_t own_end(const Request& request) const {
    return static_cast<std::size_t>((request.prompt_tokens - 1) / block_size_);
  }
  // Blocks that its windows and states take while it runs.
  std::size_t working(const Request& request) const {
    return pool_.groups() ? pool_.groups().working(blocks_for(request.token_limit)) : 0;
  }
  void plan_ends(Request& request, std::size_t hit);
  std::size_t drop_end(Request& request);
  void leave_groups(Request& request);
  std::int64_t ends_in_flight_tokens(const Request& request, std::size_t hit) const;
  void mark(Request& request);
  void unmark(const Request& request);

  BlockPool& pool_;
  std::int64_t block_size_;
  // The next block of each running prefill, and who computes it.
  std::unordered_map<std::uint64_t, const Request*> frontier_;
  // The ends that running requests will leave, in blocks, and who does; by chain hash.
  std::unordered_map<std::uint64_t, std::pair<std::size_t, const Request*>> ends_in_flight_;
};

}  // namespace kv::engine
