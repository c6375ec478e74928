// Blocks that the GPU evicted, kept in host memory: HostTier of engine/block_pool.py, whose
// docstring has the rules. About 60 bytes a block held.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "virtual_worker/changes.h"

namespace kv::engine {

class HostTier {
 public:
  using Chain = std::span<const std::uint64_t>;

  explicit HostTier(std::uint32_t blocks) : blocks_(blocks) {}

  std::uint32_t blocks() const { return blocks_; }
  std::size_t size() const { return by_hash_.size(); }

  // Blocks of `chain` from `start` on that are here. O(log n): the GPU holds those before it, not
  // the one at it, and the parent of each block here is here or on the GPU.
  std::size_t hit(Chain chain, std::size_t start) const;

  // Blocks in a row are being loaded: they stay, and are the last to go.
  void pin(Chain hashes);
  // A load has ended; no `clear` came since it began.
  void unpin(Chain hashes);

  // Takes what leaves the GPU, children before parents, and tells `log` what came and what went.
  void keep(Chain evicted, ChangeLog& log);

  void clear();

  std::vector<std::uint64_t> contents() const;  // latest first

  std::string check() const;  // what is wrong, or nothing

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;

  struct Node {
    std::uint64_t hash;
    std::uint32_t older, newer;
    std::uint32_t pins;
    bool fresh;  // came in the `keep` under way
  };

  void append(std::uint32_t id);
  void unlink(std::uint32_t id);

  std::uint32_t blocks_;
  std::vector<Node> node_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::uint64_t, std::uint32_t> by_hash_;
  std::uint32_t oldest_ = kNone;
  std::uint32_t newest_ = kNone;
};

}  // namespace kv::engine
