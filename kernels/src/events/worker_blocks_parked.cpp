#include "events/worker_blocks_parked.h"

#include <algorithm>

namespace kv {

std::size_t Run::cost_tokens() const {
  std::size_t extra_bytes = 0;
  for (const std::string& extra : extras) extra_bytes += extra.size();
  return 2 * names.size() + (chain ? 2 * chain->size() : 0) + tokens.size() + 2 * wide.size() +
         extra_bytes / 4;
}

std::size_t ParkedBlocks::memory_bytes() const {
  constexpr std::size_t kNode = 64;  // of a tree: three pointers, a colour, the key and its value
  constexpr std::size_t kRun = sizeof(Run) + kNode;
  return names_.size() * kNode + dead_.size() * kNode + runs_.size() * (kNode + kRun) + 4 * tokens_;
}

bool ParkedBlocks::park(Run run) {
  if (!has_room(run)) bury();
  if (!has_room(run)) return false;
  blocks_ += run.names.size();
  tokens_ += run.cost_tokens();
  for (const std::uint64_t name : run.names) ++names_[{name, run.tier}];
  const std::uint64_t parent = run.parent.value();
  runs_[parent].push_back(std::move(run));
  return true;
}

void ParkedBlocks::revive(Names names, std::uint8_t tier) {
  if (dead_.empty()) return;
  for (const std::uint64_t name : names) dead_.erase({name, tier});
}

void ParkedBlocks::evict(Names names, std::uint8_t tier) {
  for (const std::uint64_t name : names) {
    if (names_.contains({name, tier})) dead_.insert({name, tier});
  }
}

void ParkedBlocks::wake(Names parents, std::vector<Run>& woken) {
  for (const std::uint64_t parent : parents) {
    const auto found = runs_.find(parent);
    if (found == runs_.end()) continue;
    for (Run& run : found->second) {
      unpark(run);
      woken.push_back(std::move(run));
    }
    runs_.erase(found);
  }
}

std::vector<std::uint64_t> ParkedBlocks::take_dead(Names names, std::uint8_t tier) {
  std::vector<std::uint64_t> dead;
  if (dead_.empty()) return dead;
  for (const std::uint64_t name : names) {
    if (dead_.contains({name, tier})) dead.push_back(name);
  }
  revive(dead, tier);
  return dead;
}

void ParkedBlocks::clear() {
  runs_.clear();
  dead_.clear();
  names_.clear();
  blocks_ = tokens_ = seen_dead_ = 0;
}

bool ParkedBlocks::has_room(const Run& run) const {
  return blocks_ + run.names.size() <= limit_ && tokens_ + run.cost_tokens() <= kMaxTokens;
}

// Makes room: parks no longer what was evicted whole, for its parent may never come. Worth a look
// at everything parked only where a good part of it died since the last look.
void ParkedBlocks::bury() {
  seen_dead_ = std::min(seen_dead_, dead_.size());
  if ((dead_.size() - seen_dead_) * 8 < blocks_) return;
  for (auto at = runs_.begin(); at != runs_.end();) {
    std::erase_if(at->second, [this](const Run& run) {
      const bool dead = std::all_of(run.names.begin(), run.names.end(), [&](std::uint64_t name) {
        return dead_.contains({name, run.tier});
      });
      if (dead) unpark(run);
      return dead;
    });
    at = at->second.empty() ? runs_.erase(at) : std::next(at);
  }
  std::erase_if(dead_, [this](const Name& name) { return !names_.contains(name); });
  seen_dead_ = dead_.size();
}

void ParkedBlocks::unpark(const Run& run) {
  blocks_ -= run.names.size();
  tokens_ -= run.cost_tokens();
  for (const std::uint64_t name : run.names) {
    const auto found = names_.find({name, run.tier});
    if (--found->second == 0) names_.erase(found);
  }
}

}  // namespace kv
