#include "mirror/recency.h"

#include <algorithm>

#include "base/prefetch.h"

namespace kv {
namespace {

constexpr std::size_t kFirstPlaces = 64;
constexpr std::size_t kAhead = 16;  // probes whose lines are on their way from memory

// Block hashes are uniform, but callers may name blocks as they like (small numbers, say).
std::uint32_t tag_of(std::uint64_t hash) {
  return static_cast<std::uint32_t>((hash * 0x9E3779B97F4A7C15ULL) >> 32);
}

}  // namespace

void Recency::resize(std::size_t resident, std::size_t remembered,
                     std::vector<std::uint64_t>& left) {
  most_resident_ = resident;
  most_remembered_ = remembered;
  trim(resident, remembered, left);
}

Recency::Met Recency::touch(Hashes chain, std::uint64_t stamp, std::vector<std::uint64_t>& fresh,
                            std::vector<std::uint64_t>& left) {
  chain = chain.first(std::min(chain.size(), most_resident_));
  std::vector<Number> numbers(chain.size(), kNone);
  Met met = look_up(chain, numbers);
  Number above = kNone;
  for (Number& number : numbers) {
    if (number == kNone) continue;
    if (blocks_[number].stamp == stamp) {  // the chain names it twice: its first place counts
      number = kNone;
      continue;
    }
    if (number != (above == kNone ? warmest_ : blocks_[above].colder)) {
      unlink(number);
      link_below(above, number);
    }
    settle(number, stamp, fresh);
    above = number;
  }
  above = kNone;
  make_room(chain.size());
  for (std::size_t depth = 0; depth < chain.size(); ++depth) {
    Number number = numbers[depth];
    if (number == kNone) {
      Entry& entry = table_[place_of(chain[depth])];
      if (entry.number != kNone) continue;  // named twice
      number = add(chain[depth], entry);
      link_below(above, number);
      settle(number, stamp, fresh);
    }
    above = number;
  }
  trim(most_resident_, most_remembered_, left);
  return met;
}

void Recency::forget(Hashes chain, std::uint64_t stamp, std::vector<std::uint64_t>& left) {
  for (const std::uint64_t hash : chain) {
    const Number number = find(hash);
    if (number == kNone || blocks_[number].stamp != stamp) continue;
    if (blocks_[number].resident) {
      left.push_back(hash);
      --resident_;
    }
    erase(number);
  }
}

void Recency::drop_colder(std::uint64_t stamp, std::vector<std::uint64_t>& left) {
  while (coldest_resident_ != kNone && blocks_[coldest_resident_].stamp <= stamp) {
    demote_coldest(left);
  }
}

void Recency::revive_warmer(std::uint64_t stamp, std::vector<std::uint64_t>& fresh) {
  while (resident_ < most_resident_) {
    const Number number =
        coldest_resident_ == kNone ? warmest_ : blocks_[coldest_resident_].colder;
    if (number == kNone || blocks_[number].stamp <= stamp) return;
    settle(number, blocks_[number].stamp, fresh);
  }
}

void Recency::clear() {
  resident_ = size_ = 0;
  warmest_ = coldest_ = coldest_resident_ = free_ = kNone;
  blocks_ = {};
  table_ = {};
}

std::size_t Recency::memory_bytes() const {
  return sizeof *this + blocks_.capacity() * sizeof(Block) + table_.capacity() * sizeof(Entry);
}

std::size_t Recency::place_of(std::uint64_t hash) const {
  const std::uint32_t tag = tag_of(hash);
  for (std::size_t place = home(tag);; place = next(place)) {
    const Entry entry = table_[place];
    if (entry.number == kNone || (entry.tag == tag && blocks_[entry.number].hash == hash)) {
      return place;
    }
  }
}

Recency::Number Recency::find(std::uint64_t hash) const {
  return table_.empty() ? kNone : table_[place_of(hash)].number;
}

// Two steps: the table's line first, and half way there the block that it names.
KV_PREFETCHES void Recency::prefetch(Hashes chain, std::size_t depth) const {
  if (depth + kAhead < chain.size()) {
    prefetch_line(&table_[home(tag_of(chain[depth + kAhead]))]);
  }
  if (depth + kAhead / 2 >= chain.size()) return;
  const Number number = table_[home(tag_of(chain[depth + kAhead / 2]))].number;
  if (number != kNone) prefetch_line(&blocks_[number]);
}

// At most half full: linear probing then needs about 1.5 looks for a hit, 2.5 for a miss
// (D. Knuth, TAOCP vol. 3, 6.4), and a block that goes makes few others move.
void Recency::make_room(std::size_t more) {
  const std::size_t wanted = size_ + more;
  if (wanted > blocks_.capacity()) {
    // Half as many again, but not beyond the bound: at the bound nothing grows any more.
    const std::size_t roomy = wanted + wanted / 2;
    blocks_.reserve(std::max(wanted, std::min(roomy, most_remembered_ + more)));
  }
  if (wanted <= table_.size() / 2) return;
  std::size_t places = std::max(kFirstPlaces, table_.size());
  while (wanted > places / 2) places += places / 2;
  std::vector<Entry> old(places, Entry{kNone, 0});
  old.swap(table_);
  for (const Entry entry : old) {
    if (entry.number == kNone) continue;
    std::size_t place = home(entry.tag);
    while (table_[place].number != kNone) place = next(place);
    table_[place] = entry;
  }
}

Recency::Number Recency::add(std::uint64_t hash, Entry& entry) {
  Number number = free_;
  if (number == kNone) {
    number = static_cast<Number>(blocks_.size());
    blocks_.emplace_back();
  } else {
    free_ = blocks_[number].colder;
  }
  blocks_[number] = {hash, 0, 0, kNone, kNone};
  entry = {number, tag_of(hash)};
  ++size_;
  return number;
}

void Recency::unlink(Number number) {
  const Block& block = blocks_[number];
  if (number == coldest_resident_) coldest_resident_ = block.warmer;
  (block.warmer == kNone ? warmest_ : blocks_[block.warmer].colder) = block.colder;
  (block.colder == kNone ? coldest_ : blocks_[block.colder].warmer) = block.warmer;
}

void Recency::link_below(Number above, Number number) {
  Block& block = blocks_[number];
  block.warmer = above;
  block.colder = above == kNone ? warmest_ : blocks_[above].colder;
  (above == kNone ? warmest_ : blocks_[above].colder) = number;
  (block.colder == kNone ? coldest_ : blocks_[block.colder].warmer) = number;
}

Recency::Met Recency::look_up(Hashes chain, std::vector<Number>& found) const {
  Met met{0, {}};
  if (table_.empty()) return met;
  bool resident = true;  // all so far
  for (std::size_t depth = 0; depth < chain.size(); ++depth) {
    prefetch(chain, depth);
    const Number number = found[depth] = table_[place_of(chain[depth])].number;
    const std::uint64_t stamp = number == kNone ? 0 : blocks_[number].stamp;
    resident = resident && number != kNone && blocks_[number].resident;
    met.hit_blocks += resident;
    const bool goes_on = !met.runs.empty() && met.runs.back().end == depth;
    if (goes_on && met.runs.back().stamp == stamp) {
      met.runs.back().end = depth + 1;
    } else if ((goes_on || depth == 0) && met.runs.size() < kRuns) {
      met.runs.push_back({depth + 1, stamp});
    }
  }
  if (!met.runs.empty() && met.runs.back().stamp == 0) met.runs.pop_back();
  return met;
}

// Everything warmer than `number` is resident.
void Recency::settle(Number number, std::uint64_t stamp, std::vector<std::uint64_t>& fresh) {
  Block& block = blocks_[number];
  block.stamp = stamp & kStamp;
  if (coldest_resident_ == block.warmer) coldest_resident_ = number;
  if (block.resident) return;
  block.resident = 1;
  ++resident_;
  fresh.push_back(block.hash);
}

void Recency::demote_coldest(std::vector<std::uint64_t>& left) {
  Block& block = blocks_[coldest_resident_];
  block.resident = 0;
  --resident_;
  left.push_back(block.hash);
  coldest_resident_ = block.warmer;
}

void Recency::erase(Number number) {
  std::size_t hole = place_of(blocks_[number].hash);
  for (std::size_t at = next(hole); table_[at].number != kNone; at = next(at)) {
    // A follower may move into the hole unless its home lies after the hole: a probe for it
    // would then start behind its new place.
    const std::size_t start = home(table_[at].tag);
    const std::size_t from_home = at >= start ? at - start : at + table_.size() - start;
    const std::size_t from_hole = at >= hole ? at - hole : at + table_.size() - hole;
    if (from_home < from_hole) continue;
    table_[hole] = table_[at];
    hole = at;
  }
  table_[hole].number = kNone;
  unlink(number);
  blocks_[number].colder = free_;
  free_ = number;
  --size_;
}

void Recency::trim(std::size_t resident, std::size_t remembered,
                   std::vector<std::uint64_t>& left) {
  while (resident_ > resident) demote_coldest(left);
  if (size_ <= remembered) return;
  Number ahead = coldest_;
  for (std::size_t step = 0; step < kAhead && ahead != kNone; ++step) {
    ahead = blocks_[ahead].warmer;
  }
  while (size_ > remembered) {
    if (ahead != kNone) {
      __builtin_prefetch(&table_[home(tag_of(blocks_[ahead].hash))], 1);
      ahead = blocks_[ahead].warmer;
    }
    if (coldest_ == coldest_resident_) demote_coldest(left);
    erase(coldest_);
  }
}

}  // namespace kv
