// How PrefixIndex answers: the walk along a chain, with memory asked for in time.
#include <algorithm>
#include <array>
#include <optional>
#include <shared_mutex>

#include "index/prefix_index.h"
#include "index/prefix_walk.h"

namespace kv {
namespace {

constexpr std::size_t kFar = 24;  // blocks ahead whose record is on its way from memory
constexpr std::size_t kNear = 8;  // blocks ahead whose record is here and whose set is on its way

// The entries of a chain, one after the other.
class Stream {
 public:
  Stream(const IndexTier& tier, const WorkerSets& sets, PrefixIndex::Hashes chain)
      : tier_(tier), sets_(sets), chain_(chain) {
    for (std::size_t i = 1; i < std::min(kFar, chain.size()); ++i) tier.prefetch(chain[i]);
    for (std::size_t i = 0; i < std::min(kNear, chain.size()); ++i) fetch(i);
  }

  // The entry of block `i`, or nullptr. To be called for 0, 1, 2, ...
  Record* next(std::size_t i) {
    Record* record = near_[i % kNear];
    if (i + kFar < chain_.size()) tier_.prefetch(chain_[i + kFar]);
    if (i + kNear < chain_.size()) fetch(i + kNear);
    return record;
  }

 private:
  void fetch(std::size_t i) {
    Record* record = tier_.find(chain_[i]);
    near_[i % kNear] = record;
    if (record != nullptr) sets_.prefetch(BlockTable::word_of(*record));
  }

  const IndexTier& tier_;
  const WorkerSets& sets_;
  PrefixIndex::Hashes chain_;
  std::array<Record*, kNear> near_{};
};

}  // namespace

void PrefixIndex::longest_prefix(Hashes chain, std::int32_t* hits) const {
  std::fill_n(hits, workers(), 0);
  raise_prefix(chain, hits);
}

void PrefixIndex::raise_prefix(Hashes chain, std::int32_t* hits) const {
  const std::shared_lock lock(lock_);
  const IndexTier* gpu = tier_at(0);
  // Most prompts that are new to everybody end here.
  if (gpu == nullptr || chain.empty() || gpu->find(chain[0]) == nullptr) return;
  Stream stream(*gpu, sets_, chain);
  PrefixWalk walk(sets_, seats_, hits);
  std::size_t depth = 0;
  for (; depth < chain.size(); ++depth) {
    Record* record = stream.next(depth);
    if (record == nullptr) break;
    BlockTable::warm(*record);
    const std::uint64_t word = BlockTable::word_of(*record);
    const bool left =
        depth == 0 ? walk.start(word) : walk.keep(word, static_cast<std::int32_t>(depth));
    if (!left) return;
  }
  walk.finish(static_cast<std::int32_t>(depth));
}

void PrefixIndex::longest_prefix_tiers(Hashes chain, std::int32_t* hits) const {
  std::fill_n(hits, kTiers * workers(), 0);
  const std::shared_lock lock(lock_);
  std::array<std::optional<Stream>, kTiers> streams;
  std::array<std::optional<PrefixWalk>, kTiers> walks;
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    if (tiers_[tier] != nullptr) streams[tier].emplace(*tiers_[tier], sets_, chain);
    walks[tier].emplace(sets_, seats_, hits + tier * workers());
  }
  bool left = true;
  std::size_t depth = 0;
  for (; left && depth < chain.size(); ++depth) {
    left = false;
    SeatBits held;
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
      Record* record = streams[tier] ? streams[tier]->next(depth) : nullptr;
      if (record != nullptr) {
        BlockTable::warm(*record);
        held.add(sets_, BlockTable::word_of(*record));
      }
      PrefixWalk& walk = *walks[tier];
      if (depth == 0) walk.start(held);
      if (!walk.over()) left = walk.keep(held, static_cast<std::int32_t>(depth)) || left;
    }
  }
  for (auto& walk : walks) walk->finish(static_cast<std::int32_t>(depth));
}

// From the longest prefix down: one look at each block, whoever holds it.
void PrefixIndex::lower_to_ends(Hashes chain, const EndRule& rule,
                                std::span<const std::size_t> workers, std::int32_t* hits) const {
  const std::shared_lock lock(lock_);
  SeatBits left;
  std::size_t depth = 0;
  for (const std::size_t worker : workers) {
    if (hits[worker] <= 0) continue;
    left.add(seats_.of(worker));
    depth = std::max(depth, static_cast<std::size_t>(hits[worker]));
  }
  depth = std::min(depth, chain.size());
  // Whoever of these seats has the blocks that an end here needs, but for the first of them.
  const auto at_end = [&](const SeatBits& seats, std::size_t from) {
    SeatBits here = seats;
    for (std::size_t i = from; i < std::min(rule.tier0_blocks, depth) && !here.empty(); ++i) {
      const Record* record = tiers_[0] == nullptr ? nullptr : tiers_[0]->find(chain[depth - 1 - i]);
      if (record == nullptr) return SeatBits();
      here = here.kept(sets_, BlockTable::word_of(*record));
    }
    return here;
  };
  const bool needs_any = rule.tier1_last || rule.tier0_blocks > 0;
  const IndexTier* first = tiers_[rule.tier1_last ? 1 : 0].get();  // of those that must have it
  for (; depth > 0 && !left.empty(); --depth) {
    const Record* record = nullptr;
    if (needs_any) {  // nobody holds most blocks there: passed by with one look
      if (first == nullptr) break;
      if (depth > kNear) first->prefetch(chain[depth - 1 - kNear]);
      record = first->find(chain[depth - 1]);
      if (record == nullptr) continue;
    }
    const std::size_t seen = rule.tier1_last || !needs_any ? 0 : 1;
    const SeatBits here =
        at_end(record == nullptr ? left : left.kept(sets_, BlockTable::word_of(*record)), seen);
    here.each([&](unsigned seat) {
      std::int32_t& hit = hits[seats_.worker_on(seat)];
      if (static_cast<std::size_t>(hit) < depth) return;  // its prefix is shorter than that
      hit = static_cast<std::int32_t>(depth);
      left.remove(seat);
    });
  }
  left.each([&](unsigned seat) { hits[seats_.worker_on(seat)] = 0; });
}

}  // namespace kv
