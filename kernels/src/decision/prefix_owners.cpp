#include "decision/prefix_owners.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "index/block_table.h"

namespace kv {
namespace {

constexpr std::int64_t kMostEntries = std::int64_t{1} << 28;
constexpr std::uint64_t kShared = (std::uint64_t{1} << 62) - 1;  // no owner has this number
constexpr std::uint64_t kWarmthMask = 3;
constexpr std::uint64_t kOnce = 0;       // passes of the hand that a block survives: claimed once,
constexpr std::uint64_t kAgain = 3;      // and claimed again
constexpr std::size_t kLooks = 16384;    // of the hand for one claim, and so many more
constexpr std::size_t kLooksEach = 64;   // for each of its blocks
constexpr std::size_t kPivots = 8;       // looked up at once: their misses overlap
constexpr std::size_t kAhead = 12;       // blocks prefetched before they are walked over

constexpr std::uint64_t word_of(std::uint64_t users, std::uint64_t warmth) {
  return users << 2 | warmth;
}

constexpr std::uint64_t high_half(std::uint64_t hash) { return mix(hash) >> 32; }

std::size_t checked_entries(std::int64_t max_entries) {
  if (max_entries < 1 || max_entries > kMostEntries) {
    throw std::invalid_argument("max_entries must be 1.." + std::to_string(kMostEntries) +
                                ", got " + std::to_string(max_entries));
  }
  return static_cast<std::size_t>(max_entries);
}

std::uint64_t checked_owner(std::int64_t owner) {
  if (owner < 0 || owner > PrefixOwners::kMostOwner) {
    throw std::invalid_argument("owner must be 0.." + std::to_string(PrefixOwners::kMostOwner) +
                                ", got " + std::to_string(owner));
  }
  return static_cast<std::uint64_t>(owner);
}

}  // namespace

PrefixOwners::PrefixOwners(std::int64_t max_entries)
    : entries_(checked_entries(max_entries)), slots_(entries_.size() * 2) {}

std::size_t PrefixOwners::claim(Hashes chain, std::int64_t owner) {
  const std::uint64_t own = checked_owner(owner);
  const std::lock_guard lock(mutex_);
  const auto [shared, known] = ends(chain);
  // The blocks between the ends are one owner's, so one tells of all; and the first of them tells
  // whether the hand came by since they were warmed, all of them together.
  const bool of_other = shared < known && find(chain[known - 1])->word >> 2 != own;
  const bool tail_cooled = shared < known && cooled(chain[shared]);
  const bool head_cooled = shared > 0 && cooled(chain[shared - 1]);
  looks_ = kLooks + kLooksEach * chain.size();
  Walk walk{own, 0};
  settle(chain, known, chain.size(), walk);
  if (of_other || tail_cooled || walk.users != own) settle(chain, shared, known, walk);
  walk.users = kShared;
  if (head_cooled) settle(chain, 0, shared, walk);
  return std::max(shared, walk.shared);
}

std::size_t PrefixOwners::shared(Hashes chain) const {
  const std::lock_guard lock(mutex_);
  return ends(chain).shared;
}

PrefixOwners::Owned PrefixOwners::owner(Hashes chain) const {
  const std::lock_guard lock(mutex_);
  const std::size_t known = ends(chain).known;
  if (known == 0) return {-1, 0};
  const std::uint64_t users = find(chain[known - 1])->word >> 2;
  return {users == kShared ? -1 : static_cast<std::int64_t>(users), known};
}

// The first place in from..to-1 whose block is not such, or `to`; the one before it, if any, is.
template <typename Holds>
std::size_t PrefixOwners::first_without(Hashes chain, std::size_t from, std::size_t to,
                                        Holds holds) const {
  while (from < to) {
    const std::size_t step = (to - from + kPivots - 1) / kPivots;
    for (std::size_t at = from; at < to; at += step) prefetch(chain[at]);
    for (std::size_t at = from, end = to; at < end; at += step) {
      const Entry* entry = find(chain[at]);
      if (entry != nullptr && holds(*entry)) {
        from = at + 1;
      } else {
        to = at;
        break;
      }
    }
  }
  return to;
}

PrefixOwners::Ends PrefixOwners::ends(Hashes chain) const {
  const std::size_t known =
      first_without(chain, 0, chain.size(), [](const Entry&) { return true; });
  const auto is_shared = [](const Entry& entry) { return entry.word >> 2 == kShared; };
  return {first_without(chain, 0, known, is_shared), known};
}

bool PrefixOwners::cooled(std::uint64_t hash) const {
  const Entry* entry = find(hash);
  return entry == nullptr || (entry->word & kWarmthMask) < kAgain;
}

// Who uses a block uses those before it: from the last block to the first, users only add up.
void PrefixOwners::settle(Hashes chain, std::size_t from, std::size_t to, Walk& walk) {
  for (std::size_t i = to; i > from && i + kAhead > to; --i) prefetch(chain[i - 1]);
  for (std::size_t i = to; i-- > from;) {
    if (i >= from + kAhead) prefetch(chain[i - kAhead]);
    const Entry* found = find(chain[i]);
    if (found != nullptr && found->word >> 2 != walk.users) walk.users = kShared;
    if (walk.users == kShared) walk.shared = std::max(walk.shared, i + 1);
    if (found == nullptr) {
      insert(chain[i], walk.users);
    } else {
      const_cast<Entry*>(found)->word = word_of(walk.users, kAgain);
    }
  }
}

// Deeper blocks come first (`settle`), so the hand takes a chain's end before its start.
void PrefixOwners::insert(std::uint64_t hash, std::uint64_t users) {
  std::size_t place = size_;
  if (size_ == entries_.size()) {
    place = coldest();
    unlink(place);
    ++evicted_;
  } else {
    ++size_;
  }
  entries_[place] = {hash, word_of(users, kOnce)};
  std::size_t slot = home(hash);
  while (slots_[slot] != 0) slot = next(slot);
  slots_[slot] = high_half(hash) << 32 | (place + 1);
}

// A clock with counters (GCLOCK: A. Smith, "Sequentiality and Prefetching in Database Systems",
// 1978). It takes the least warm of those it has seen once it has looked long enough: a claim ends
// in time though all be warm, and a warm stretch is passed over, not nibbled at.
std::size_t PrefixOwners::coldest() {
  std::size_t victim = hand_;
  std::uint64_t least = kWarmthMask + 1;
  do {
    const std::size_t soon = hand_ + kAhead;  // to be unlinked, if nobody used it since
    if (soon < entries_.size()) prefetch(entries_[soon].hash);
    Entry& entry = entries_[hand_];
    const std::uint64_t warmth = entry.word & kWarmthMask;
    if (warmth < least) {
      victim = hand_;
      least = warmth;
    }
    hand_ = hand_ + 1 == entries_.size() ? 0 : hand_ + 1;
    if (warmth == 0) break;
    --entry.word;
  } while (--looks_ > 0);
  looks_ = std::max<std::size_t>(looks_, 1);
  return victim;
}

std::size_t PrefixOwners::home(std::uint64_t hash) const {
  return static_cast<std::size_t>((high_half(hash) * slots_.size()) >> 32);
}

const PrefixOwners::Entry* PrefixOwners::find(std::uint64_t hash) const {
  for (std::size_t slot = home(hash); slots_[slot] != 0; slot = next(slot)) {
    if (slots_[slot] >> 32 != high_half(hash)) continue;
    const Entry& entry = entries_[static_cast<std::uint32_t>(slots_[slot]) - 1];
    if (entry.hash == hash) return &entry;
  }
  return nullptr;
}

void PrefixOwners::unlink(std::size_t place) {
  const std::size_t count = slots_.size();
  std::size_t hole = home(entries_[place].hash);
  while (static_cast<std::uint32_t>(slots_[hole]) != place + 1) hole = next(hole);
  for (std::size_t at = next(hole); slots_[at] != 0; at = next(at)) {
    // A follower may move into the hole unless its home lies behind the hole.
    const std::size_t start = static_cast<std::size_t>(((slots_[at] >> 32) * count) >> 32);
    const std::size_t from_home = at >= start ? at - start : at + count - start;
    const std::size_t from_hole = at >= hole ? at - hole : at + count - hole;
    if (from_home < from_hole) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole] = 0;
}

std::size_t PrefixOwners::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

std::uint64_t PrefixOwners::evicted() const {
  const std::lock_guard lock(mutex_);
  return evicted_;
}

std::size_t PrefixOwners::memory_bytes() const {
  return entries_.size() * sizeof(Entry) + slots_.size() * sizeof(std::uint64_t);
}

}  // namespace kv
