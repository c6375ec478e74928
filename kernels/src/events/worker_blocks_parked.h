// Stored blocks whose parent has not been seen, kept until it comes or they are evicted. The rules
// are those of `tests/oracles/worker_blocks.py`. Lifetime: worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kv {

// Blocks stored in a row, by their chain hashes or by what is hashed.
struct Run {
  std::vector<std::uint64_t> names;
  std::optional<std::uint64_t> parent;
  std::uint8_t tier = 0;
  std::optional<std::vector<std::uint64_t>> chain;
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> wide;    // instead of `tokens`, where one of them is beyond int32
  std::vector<std::string> extras;  // one a block, or none at all
  std::size_t unit = 1;             // blocks a name

  // What it takes while it is parked; a chain hash counts as two tokens, so do a name and a token
  // of 64 bits.
  std::size_t cost_tokens() const;
};

class ParkedBlocks {
 public:
  static constexpr std::size_t kMaxTokens = 1U << 24;  // 64 MiB

  using Names = std::span<const std::uint64_t>;
  using Name = std::pair<std::uint64_t, std::uint8_t>;  // an engine's name of a block, its tier

  explicit ParkedBlocks(std::size_t limit) : limit_(limit) {}

  std::size_t limit() const { return limit_; }
  std::size_t blocks() const { return blocks_; }
  std::size_t memory_bytes() const;

  // Whether there is anything to be asked: nearly always there is not.
  bool any() const { return !runs_.empty() || !dead_.empty(); }

  // Keeps a run until its parent is stored; false where there is no room for it.
  bool park(Run run);

  // These blocks are stored anew: an eviction before says nothing of them any more.
  void revive(Names names, std::uint8_t tier);

  // Those of these blocks that are parked must not come to life with their parent.
  void evict(Names names, std::uint8_t tier);

  // Appends the runs that waited for these parents; parked no longer.
  void wake(Names parents, std::vector<Run>& woken);

  // Those of these blocks that were evicted while they were parked; forgotten here.
  std::vector<std::uint64_t> take_dead(Names names, std::uint8_t tier);

  void clear();

  const std::map<std::uint64_t, std::vector<Run>>& runs() const { return runs_; }
  const std::set<Name>& dead() const { return dead_; }

 private:
  bool has_room(const Run& run) const;
  void bury();
  void unpark(const Run& run);

  std::size_t limit_;
  std::map<std::uint64_t, std::vector<Run>> runs_;  // by the parent they wait for
  std::set<Name> dead_;                 // parked, and evicted before their parent came
  std::map<Name, std::uint32_t> names_;  // how often each is parked
  std::size_t blocks_ = 0;
  std::size_t tokens_ = 0;
  std::size_t seen_dead_ = 0;  // that the last burial left behind
};

}  // namespace kv
