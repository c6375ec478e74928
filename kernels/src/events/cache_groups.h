// The cache groups of a hybrid model beside its full-attention group: sliding windows and states.
// Which blocks each of them holds, under the engine's names, and how long a hit they allow. A block
// has one name in all groups, as in vLLM. What each member means is written at the oracle,
// `tests/oracles/cache_groups.py`. Lifetime: worker; its owner guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "events/block_names.h"
#include "events/event_batch.h"
#include "index/prefix_index.h"

namespace kv {

class CacheGroups {
 public:
  using Names = std::span<const std::uint64_t>;
  static constexpr std::size_t kMostGroups = 16;
  static constexpr std::size_t kMostHeld = 1U << 20;  // blocks of all groups together

  struct Group {
    std::uint32_t number;
    CacheKind kind;  // window or state
    std::uint32_t window;      // tokens; 0 for a state
    std::uint32_t block_size;  // tokens
    BlockNames held;  // by name; a `chain` there is how many copies are held
  };

  // What people are told of a group.
  struct Facts {
    std::uint32_t number;
    CacheKind kind;
    std::uint32_t window;
    std::uint32_t block_size;
    std::size_t held;  // blocks, copies not counted
  };

  bool empty() const { return groups_.empty(); }
  std::size_t memory_bytes() const;
  const std::vector<Group>& groups() const { return groups_; }

  // Says whether all of it was kept.
  bool store(const Event& event, Names names, bool counts_copies);
  void remove(std::uint32_t group, Names names);
  void leave(std::uint32_t group);  // it is of another kind now
  void forget();                    // blocks, and not the groups
  void put(Group group);
  std::size_t held() const;

  // Whether there are such groups that can be judged, and all of them hold the block.
  bool all_hold(CacheKind kind, std::uint64_t name) const;
  // Calls see(name) for each of these blocks.
  template <class See>
  void each_held_by_all(CacheKind kind, See see) const;

  // Whether one of them can judge hits in blocks of this size.
  bool judge(std::uint32_t block_size) const;

  // How `longest` may be computed from nothing but who holds what: none where windows differ, or
  // blocks are larger than those of full attention.
  std::optional<PrefixIndex::EndRule> rule(std::uint32_t block_size) const;
  // Grows where a group comes or goes, or is another one.
  std::uint64_t changes() const { return changes_; }

  std::vector<Facts> facts() const;

  // The greatest number of leading blocks, at most `blocks`, that every group lets an engine reuse.
  // `chain`: chain hashes of blocks of `block_size` tokens; `by_chain`: their names.
  std::size_t longest(Names chain, std::size_t blocks, std::uint32_t block_size,
                      const BlockNames& by_chain) const;

 private:
  Group* find(std::uint32_t number);
  static bool is_judged(const Group& group) {
    return group.kind == CacheKind::state || group.window > 1;
  }

  std::vector<Group> groups_;  // in the order in which they were met
  std::uint64_t changes_ = 0;
};

template <class See>
void CacheGroups::each_held_by_all(CacheKind kind, See see) const {
  const Group* least = nullptr;
  for (const Group& group : groups_) {
    if (group.kind != kind || !is_judged(group)) continue;
    if (least == nullptr || group.held.size() < least->held.size()) least = &group;
  }
  if (least == nullptr) return;
  least->held.each([&](const BlockNames::Known& known) {
    if (all_hold(kind, known.name())) see(known.name());
  });
}

}  // namespace kv
