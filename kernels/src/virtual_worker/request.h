// One request inside a virtual worker: its progress, the names of its blocks, those it holds.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "virtual_worker/block_pool.h"

namespace kv::engine {

// Name of a full block that no chain was given for: nobody else's, the same in both twins. The
// finalizer of splitmix64 (Steele, Lea, Flood, 2014) over request and depth.
inline std::uint64_t own_hash(std::int64_t request_id, std::size_t depth) {
  std::uint64_t mixed = static_cast<std::uint64_t>(request_id) * 0x9E3779B97F4A7C15ULL + depth + 1;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
  return mixed ^ (mixed >> 31);
}

// Fields as in engine/scheduler/request.py. Lifetime: request.
struct Request {
  std::int64_t id = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // given so far
  std::int64_t token_limit = 0;
  std::int64_t computed_tokens = 0;
  std::int64_t prefill_target = 0;
  std::int64_t cached_tokens = 0;
  double arrival_s = 0.0;
  // The place in every queue: preempted ones first, then by priority and age, then by turn.
  bool was_preempted = false;  // and waits since
  double aged_s = 0.0;
  std::uint64_t serial = 0;
  std::int64_t preemptions = 0;
  std::uint64_t epoch = 0;  // of the pool, at admission
  bool running = false;
  bool imports = false;  // another worker has its prompt's KV; false from its start on
  bool exports = false;  // another worker will read its prompt's KV when it has ended
  bool reading = false;  // its blocks are reserved, and KV from elsewhere is written into them
  std::int64_t read_target = 0;  // while it reads: leading tokens whose KV it has after that
  std::size_t host_blocks = 0;   // while it reads: blocks that it loads from the host
  bool started = false;
  std::size_t visible_blocks = 0;
  std::size_t known_blocks = 0;      // of the names, those that prompt and output have reached
  std::vector<std::uint64_t> names;  // as given, and own ones where that is not enough
  std::vector<BlockId> blocks;
  std::vector<BlockId> group_blocks;  // that its windows and states take
  std::vector<std::size_t> ends;      // in blocks: it will leave such ones there

  Chain chain() const { return {names.data(), known_blocks}; }
  std::int64_t total_tokens() const { return prompt_tokens + output_tokens; }
  bool prefilling() const { return computed_tokens < prefill_target; }

  // `chain` covers `full_blocks` blocks from now on.
  void extend_chain(std::size_t full_blocks) {
    if (full_blocks <= known_blocks) return;
    for (std::size_t at = names.size(); at < full_blocks; ++at) names.push_back(own_hash(id, at));
    known_blocks = full_blocks;
  }

  static bool before(const Request* left, const Request* right) {
    return std::tuple(!left->was_preempted, left->aged_s, left->serial) <
           std::tuple(!right->was_preempted, right->aged_s, right->serial);
  }
};

}  // namespace kv::engine
