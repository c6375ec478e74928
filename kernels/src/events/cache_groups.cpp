#include "events/cache_groups.h"

#include <algorithm>
#include <numeric>

namespace kv {
namespace {

// How one group judges a hit, in blocks of the full-attention group.
struct Rule {
  const BlockNames* held;
  std::size_t step;    // of those blocks in one of its own
  std::size_t needed;  // of its own blocks that end at the hit, if there are so many
};

// ceil((W-1)/b): the tokens before the next one that its window still reaches.
std::size_t needed_blocks(const CacheGroups::Group& group) {
  if (group.kind == CacheKind::state) return 1;
  const std::size_t size = group.block_size;
  return (group.window + size - 2) / size;
}

// A group whose blocks are no multiple of the others' cannot be judged: the hit is an upper bound.
std::vector<Rule> rules_of(const std::vector<CacheGroups::Group>& groups,
                           std::uint32_t block_size) {
  std::vector<Rule> rules;
  for (const CacheGroups::Group& group : groups) {
    if (group.block_size == 0 || group.block_size % block_size != 0) continue;
    const std::size_t needed = needed_blocks(group);
    if (needed > 0) rules.push_back({&group.held, group.block_size / block_size, needed});
  }
  return rules;
}

bool holds(const BlockNames& held, const BlockNames& by_chain, std::uint64_t chain) {
  const BlockNames::Known named = by_chain.find(chain);
  return named && held.find(named.chain());
}

}  // namespace

bool CacheGroups::judge(std::uint32_t block_size) const {
  return !rules_of(groups_, block_size).empty();
}

std::size_t CacheGroups::memory_bytes() const {
  std::size_t bytes = groups_.capacity() * sizeof(Group);
  for (const Group& group : groups_) bytes += group.held.memory_bytes();
  return bytes;
}

std::size_t CacheGroups::held() const {
  std::size_t all = 0;
  for (const Group& group : groups_) all += group.held.size();
  return all;
}

std::vector<CacheGroups::Facts> CacheGroups::facts() const {
  std::vector<Facts> all;
  for (const Group& one : groups_) {
    all.push_back({one.number, one.kind, one.window, one.block_size, one.held.size()});
  }
  return all;
}

CacheGroups::Group* CacheGroups::find(std::uint32_t number) {
  const auto is_it = [&](const Group& group) { return group.number == number; };
  const auto found = std::find_if(groups_.begin(), groups_.end(), is_it);
  return found == groups_.end() ? nullptr : &*found;
}

void CacheGroups::put(Group group) {
  groups_.push_back(std::move(group));
  ++changes_;
}

bool CacheGroups::all_hold(CacheKind kind, std::uint64_t name) const {
  bool any = false;
  for (const Group& group : groups_) {
    if (group.kind != kind || !is_judged(group)) continue;
    if (!group.held.find(name)) return false;
    any = true;
  }
  return any;
}

std::optional<PrefixIndex::EndRule> CacheGroups::rule(std::uint32_t block_size) const {
  PrefixIndex::EndRule rule;
  for (const Group& group : groups_) {
    if (!is_judged(group)) continue;
    if (group.block_size != block_size) return std::nullopt;
    if (group.kind == CacheKind::state) {
      rule.tier1_last = true;
      continue;
    }
    const std::size_t needed = needed_blocks(group);
    if (rule.tier0_blocks != 0 && rule.tier0_blocks != needed) return std::nullopt;
    rule.tier0_blocks = needed;
  }
  return rule;
}

bool CacheGroups::store(const Event& event, Names names, bool counts_copies) {
  const std::uint32_t number = event.group < 0 ? 0 : static_cast<std::uint32_t>(event.group);
  Group* group = find(number);
  if (group == nullptr) {
    if (groups_.size() == kMostGroups) return false;
    put({number, event.cache, event.window, event.block_size, {}});
    group = &groups_.back();
  } else if (group->kind != event.cache || group->window != event.window ||
             group->block_size != event.block_size) {  // what it held is another's
    *group = {number, event.cache, event.window, event.block_size, {}};
    ++changes_;
  }
  std::size_t room = kMostHeld - std::min(kMostHeld, held());
  for (const std::uint64_t name : names) {
    BlockNames::Known known = group->held.find(name);
    if (known) {
      if (counts_copies) known.set(known.chain() + 1, 1);
    } else if (room > 0) {
      group->held.at(name).set(1, 1);
      --room;
    } else {
      return false;
    }
  }
  return true;
}

void CacheGroups::remove(std::uint32_t number, Names names) {
  Group* group = find(number);
  if (group == nullptr) return;
  for (const std::uint64_t name : names) {
    BlockNames::Known known = group->held.find(name);
    if (!known) continue;
    if (known.chain() > 1) {
      known.set(known.chain() - 1, 1);
    } else {
      group->held.erase(known);
    }
  }
}

void CacheGroups::leave(std::uint32_t number) {
  ++changes_;
  std::erase_if(groups_, [&](const Group& group) { return group.number == number; });
}

void CacheGroups::forget() {
  for (Group& group : groups_) group.held.clear();
}

// From the longest end down. A block that is missing rules out all ends whose window it is in.
std::size_t CacheGroups::longest(Names chain, std::size_t blocks, std::uint32_t block_size,
                                 const BlockNames& by_chain) const {
  const std::vector<Rule> rules = rules_of(groups_, block_size);
  std::size_t unit = 1;
  for (const Rule& rule : rules) unit = std::lcm(unit, rule.step);
  std::size_t end = std::min(blocks, chain.size());
  for (bool fits = false; !fits;) {
    end -= end % unit;
    fits = true;
    for (const Rule& rule : rules) {
      const std::size_t needed = std::min(rule.needed, end / rule.step);
      for (std::size_t i = 0; i < needed && fits; ++i) {
        const std::size_t last = end - i * rule.step;
        if (holds(*rule.held, by_chain, chain[last - 1])) continue;
        end = last - rule.step;
        fits = false;
      }
      if (!fits) break;
    }
  }
  return end;
}

}  // namespace kv
