#include "events/worker_blocks.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "base/chain.h"
#include "base/chain_media.h"

namespace kv {
namespace {

constexpr std::size_t kAhead = 24;       // names whose slots are fetched before they are wanted
constexpr std::size_t kMostPending = 4096;
// Which groups' blocks `ends_` has in which tier.
constexpr std::array kEnds = {std::pair(CacheKind::window, 0), std::pair(CacheKind::state, 1)};
constexpr std::size_t kCopyBytes = 40;  // of a hash map: the node, its share of the buckets
constexpr std::size_t kChunkBytes = 64;  // the same with a list, without what is in it

}  // namespace

WorkerBlocks::WorkerBlocks(PrefixIndex& index, std::int64_t worker, std::uint32_t block_size,
                           std::string_view model, std::size_t max_parked, bool counts_copies)
    : index_(index),
      worker_(worker),
      block_size_(block_size),
      model_(model),
      counts_copies_(counts_copies),
      parked_(max_parked) {
  if (worker < 0 || static_cast<std::size_t>(worker) >= index.workers()) {
    throw std::out_of_range("worker must be 0.." + std::to_string(index.workers() - 1) + ", got " +
                            std::to_string(worker));
  }
}

std::vector<std::uint64_t> WorkerBlocks::apply(const EventBatch& batch, const Placed& placed) {
  const std::lock_guard lock(mutex_);
  left_.clear();
  if (placed_.size() > 0) placed_.clear();
  for (std::size_t i = 0; i < placed.names.size(); ++i) {
    placed_.at(placed.names[i]).set(placed.chain[i], 1);
  }
  const auto all = batch.names();
  for (std::size_t i = 0; i < std::min(kAhead, all.size()); ++i) names_.prefetch(all[i]);
  for (const Event& event : batch.events()) {
    // Single blocks find their slots fetched by the events before them.
    const std::size_t ahead = event.names_at + kAhead;
    if (event.names == 1 && ahead < all.size()) names_.prefetch(all[ahead]);
    if (event.kind == Event::Kind::stored) {
      take_stored(batch, event);
    } else if (event.kind == Event::Kind::removed) {
      take_removed(batch, event);
    } else {
      ++counters_.clears;
      forget();
    }
  }
  tell_all();
  return std::move(left_);
}

void WorkerBlocks::store(const Stored& run) {
  const std::lock_guard lock(mutex_);
  store_run(run, 0);
  tell_all();
}

void WorkerBlocks::store_tokens(const Stored& run, std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  store_told(run, seed);
  tell_all();
}

std::vector<std::uint64_t> WorkerBlocks::remove(Names names, std::uint8_t tier) {
  const std::lock_guard lock(mutex_);
  left_.clear();
  remove_named(names, tier);
  tell_all();
  return std::move(left_);
}

void WorkerBlocks::clear() {
  const std::lock_guard lock(mutex_);
  forget();
}

std::vector<std::uint64_t> WorkerBlocks::chains(int tier) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> held;
  names_.each([&](const BlockNames::Known& known) {
    if ((known.tiers() >> tier & 1) != 0) held.push_back(known.chain());
  });
  std::sort(held.begin(), held.end());
  held.erase(std::unique(held.begin(), held.end()), held.end());
  return held;
}

std::size_t WorkerBlocks::limit(Names chain, std::size_t blocks) const {
  const std::lock_guard lock(mutex_);
  return is_hybrid_ ? groups_.longest(chain, blocks, block_size_, by_chain_) : blocks;
}

void WorkerBlocks::attach(PrefixIndex* ends) {
  const std::lock_guard lock(mutex_);
  if (ends_ != nullptr) ends_->clear_worker(worker_);
  ends_ = ends;
  tell_ends();
}

std::optional<PrefixIndex::EndRule> WorkerBlocks::end_rule() const {
  const std::lock_guard lock(mutex_);
  return ends_ == nullptr ? std::nullopt : groups_.rule(block_size_);
}

bool WorkerBlocks::has_full_attention() const {
  const std::lock_guard lock(mutex_);
  return full_attention_;
}

bool WorkerBlocks::is_hybrid() const {
  const std::lock_guard lock(mutex_);
  return is_hybrid_;
}

std::vector<CacheGroups::Facts> WorkerBlocks::groups() const {
  const std::lock_guard lock(mutex_);
  return groups_.facts();
}

std::size_t WorkerBlocks::size() const {
  const std::lock_guard lock(mutex_);
  return names_.size();
}

std::size_t WorkerBlocks::parked() const {
  const std::lock_guard lock(mutex_);
  return parked_.blocks();
}

std::size_t WorkerBlocks::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t copy_bytes = 0;
  for (const CopiesInTier& copies : copies_) copy_bytes += copies.size() * kCopyBytes;
  for (const auto& [name, inner] : chunks_) {
    copy_bytes += kChunkBytes + inner.capacity() * sizeof(std::uint64_t);
  }
  return sizeof *this + names_.memory_bytes() + parked_.memory_bytes() + bytes_.capacity() +
         (pending_.capacity() + chain_.capacity()) * sizeof(std::uint64_t) +
         woken_.capacity() * sizeof(Run) + copy_bytes +
         groups_.memory_bytes() + by_chain_.memory_bytes();
}

std::vector<WorkerBlocks::OtherSize> WorkerBlocks::other_sizes() const {
  const std::lock_guard lock(mutex_);
  return other_sizes_;
}

WorkerBlocks::Counters WorkerBlocks::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void WorkerBlocks::take_stored(const EventBatch& batch, const Event& event) {
  const std::uint32_t group = event.group < 0 ? 0 : static_cast<std::uint32_t>(event.group);
  if (event.cache == CacheKind::full && !full_attention_) take_full_group(group);
  const bool is_taken = take_group(batch, event);
  if (event.group >= 0 && group != group_) {
    if (!is_taken) ++counters_.other_group;
    return;
  }
  if (is_taken && take_placed(batch, event)) return;
  if (event.masked && is_taken && batch.windows_alone()) note_size(event);
  if (event.masked) {  // where in the prompt its blocks are, nobody can tell
    if (event.names > 0) ++counters_.masked;
    return;
  }
  if (event.tokens > 0) {
    if (event.tier == 0) note_size(event);
    if (event.block_size != block_size_ && event.tier == 0) {
      ++counters_.other_block_size;
      return;
    }
    if (event.block_size % block_size_ != 0 ||
        (event.has_extras && event.block_size != block_size_)) {
      ++counters_.chunk_size;
      return;
    }
  }
  std::vector<std::string_view> extras;
  for (std::size_t i = 0; event.has_extras && i < event.names; ++i) {
    extras.push_back(batch.extra(event, i));
  }
  Stored run{batch.names(event), std::nullopt, event.tier, std::nullopt, batch.tokens(event),
             extras, batch.wide_tokens(event)};
  if (event.tokens > 0) run.unit = event.block_size / block_size_;
  std::uint64_t seed = 0;
  if (event.has_parent) {
    run.parent = event.parent;
  } else {
    seed = chain_seed(model_, batch.lora(event), batch.salt(event));
  }
  store_told(run, seed);
}

void WorkerBlocks::take_removed(const EventBatch& batch, const Event& event) {
  const std::uint32_t group = event.group < 0 ? 0 : static_cast<std::uint32_t>(event.group);
  const bool counts = event.group < 0 || group == group_;
  if (counts) remove_named(batch.names(event), event.tier);
  if (event.tier != 0 || groups_.empty() || (counts && full_attention_)) return;
  groups_.remove(group, batch.names(event));
  for (const std::uint64_t name : batch.names(event)) tell_named(name);
}

// Blocks of windows without full attention, whose places somebody computed; false where nobody did.
bool WorkerBlocks::take_placed(const EventBatch& batch, const Event& event) {
  if (full_attention_ || event.block_size != block_size_) return false;
  std::vector<std::uint64_t> names;
  std::vector<std::uint64_t> chain;
  for (const std::uint64_t name : batch.names(event)) {
    const BlockNames::Known place = placed_.find(name);
    if (!place) continue;
    names.push_back(name);
    chain.push_back(place.chain());
  }
  if (names.empty()) return false;
  if (names.size() < event.names) ++counters_.masked;
  ++counters_.own_size;
  if (!is_placed_) {
    is_placed_ = true;
    name_chains();
  }
  store_run({names, std::nullopt, event.tier, chain, {}, {}, {}}, 0);
  return true;
}

// What was told before of blocks was another group's.
void WorkerBlocks::take_full_group(std::uint32_t group) {
  full_attention_ = true;
  if (group != group_ || is_placed_) {
    group_ = group;
    is_placed_ = false;
    forget_blocks();
  }
  groups_.leave(group);
  name_chains();
}

// Blocks of a window or states, in tier 0; false for all others.
bool WorkerBlocks::take_group(const EventBatch& batch, const Event& event) {
  const bool is_ours = event.cache == CacheKind::window || event.cache == CacheKind::state;
  const bool is_full = full_attention_ && (event.group < 0 ? 0 : event.group) ==
                                              static_cast<std::int32_t>(group_);
  if (!is_ours || is_full || event.tier != 0) return false;
  const std::uint64_t changes = groups_.changes();
  if (!groups_.store(event, batch.names(event), counts_copies_)) ++counters_.no_room;
  if (!is_hybrid_) {
    name_chains();
  } else if (changes != groups_.changes()) {
    tell_ends();
  } else {
    for (const std::uint64_t name : batch.names(event)) tell_named(name);
  }
  return true;
}

void WorkerBlocks::name_chains() {
  is_hybrid_ = full_attention_ ? !groups_.empty() : is_placed_ && groups_.judge(block_size_);
  if (is_hybrid_ && !chunks_.empty()) forget_chunks();
  by_chain_.clear();
  if (!is_hybrid_) return;
  names_.each([&](const BlockNames::Known& known) {
    BlockNames::Known named = by_chain_.at(known.chain());
    if (named.tiers() == 0 || named.chain() < known.name()) named.set(known.name(), 1);
  });
  tell_ends();
}

void WorkerBlocks::tell_ends() {
  if (ends_ == nullptr) return;
  ends_->clear_worker(worker_);
  for (const auto& [kind, tier] : kEnds) {
    std::vector<std::uint64_t> chains;
    groups_.each_held_by_all(kind, [&](std::uint64_t name) {
      const BlockNames::Known known = names_.find(name);
      if (known) chains.push_back(known.chain());
    });
    ends_->store(worker_, chains, tier);
  }
}

void WorkerBlocks::tell_named(std::uint64_t name) {
  if (ends_ == nullptr) return;
  const BlockNames::Known known = names_.find(name);
  if (known) tell_end(known.chain(), name);
}

// Which of the groups hold the block now.
void WorkerBlocks::tell_end(std::uint64_t chain, std::uint64_t name) {
  if (ends_ == nullptr) return;
  for (const auto& [kind, tier] : kEnds) {
    const std::span<const std::uint64_t> one(&chain, 1);
    if (groups_.all_hold(kind, name)) {
      ends_->store(worker_, one, tier);
    } else {
      ends_->remove(worker_, one, tier);
    }
  }
}

// The name does not stand for this chain any more.
void WorkerBlocks::unname(std::uint64_t chain, std::uint64_t name) {
  if (!is_hybrid_) return;
  const BlockNames::Known known = by_chain_.find(chain);
  if (!known || known.chain() != name) return;
  by_chain_.erase(known);
  for (const auto& [kind, tier] : kEnds) {
    if (ends_ != nullptr) ends_->remove(worker_, std::span<const std::uint64_t>(&chain, 1), tier);
  }
}

void WorkerBlocks::note_size(const Event& event) {
  if (event.block_size == block_size_) {
    ++counters_.own_size;
    return;
  }
  const auto is_it = [&](const OtherSize& one) { return one.block_size == event.block_size; };
  auto found = std::find_if(other_sizes_.begin(), other_sizes_.end(), is_it);
  if (found == other_sizes_.end()) {
    const bool is_full = other_sizes_.size() == kMostSizes;
    const bool is_last = other_sizes_.size() + 1 == kMostSizes;
    if (!is_full) other_sizes_.push_back({is_last ? 0 : event.block_size});
    found = std::prev(other_sizes_.end());
  }
  const bool is_partial = event.names == 1 && event.block_size < block_size_;
  ++(is_partial ? found->partial : found->whole);
}

void WorkerBlocks::store_told(const Stored& run, std::uint64_t seed) {
  if ((run.tokens.empty() && run.wide.empty()) || (run.tier > 0 && are_known(run))) {
    resolve(run);
  } else {
    store_run(run, seed);
  }
}

bool WorkerBlocks::are_known(const Stored& run) const {
  return std::all_of(run.names.begin(), run.names.end(), [&](std::uint64_t name) {
    return run.unit > 1 ? chunks_.contains(name) : static_cast<bool>(names_.find(name));
  });
}

// Names without tokens mean what they mean in another tier.
void WorkerBlocks::resolve(const Stored& run) {
  std::vector<std::uint64_t> known;
  std::vector<std::uint64_t> chain;
  for (const std::uint64_t name : run.names) {
    const BlockNames::Known entry = names_.find(name);
    if (!entry) continue;
    known.push_back(name);
    chain.push_back(entry.chain());
  }
  if (known.size() < run.names.size()) ++counters_.unknown_names;
  if (parked_.any()) parked_.revive(known, run.tier);
  hold(known, chain, run.tier, counts_copies_);
}

// A parent that arrives late brings its parked descendants along.
void WorkerBlocks::store_run(const Stored& run, std::uint64_t seed) {
  if (run.names.empty()) return;
  if (parked_.any()) parked_.revive(run.names, run.tier);
  if (!place(run, seed, false)) return;
  std::vector<Run> placed;
  while (!woken_.empty()) {
    const Run& woken = placed.emplace_back(std::move(woken_.back()));
    woken_.pop_back();
    const std::vector<std::string_view> extras(woken.extras.begin(), woken.extras.end());
    Stored next{woken.names, woken.parent, woken.tier, std::nullopt, woken.tokens, extras,
                woken.wide, woken.unit};
    if (woken.chain) next.chain = *woken.chain;
    place(next, 0, true);
  }
  // Last: a block may be in several of them, and its removal holds for all.
  for (const Run& woken : placed) drop(parked_.take_dead(woken.names, woken.tier), woken.tier);
}

// Stores a run whose parent is known, or parks it and says false. A run that waited is no copy: of
// what was told and removed meanwhile nobody knows how much it still stands for.
bool WorkerBlocks::place(const Stored& run, std::uint64_t seed, bool woken) {
  if (run.unit > 1 && !groups_.empty()) {  // of which group it is, nobody can tell
    ++counters_.other_group;
    return false;
  }
  if (run.parent) {
    const BlockNames::Known parent = names_.find(*run.parent);
    if (!parent) {
      Run orphan{{run.names.begin(), run.names.end()},
                 run.parent,
                 run.tier,
                 std::nullopt,
                 {run.tokens.begin(), run.tokens.end()},
                 {run.wide.begin(), run.wide.end()},
                 {run.extras.begin(), run.extras.end()},
                 run.unit};
      if (run.chain) orphan.chain.emplace(run.chain->begin(), run.chain->end());
      if (parked_.park(std::move(orphan))) {
        counters_.orphans += run.names.size();
      } else {
        ++counters_.no_room;
      }
      return false;
    }
    seed = parent.chain();
  }
  if (run.unit > 1) {
    hold_chunks(run, seed, counts_copies_ && !woken);
  } else {
    hold(run.names, chain_of(run, seed), run.tier, counts_copies_ && !woken);
  }
  if (parked_.any()) parked_.wake(run.names, woken_);
  return true;
}

// Outside the GPU a name that is known keeps its chain: there vLLM leaves out salts and images.
WorkerBlocks::Names WorkerBlocks::chain_of(const Stored& run, std::uint64_t seed) {
  if (run.chain) return *run.chain;
  const std::size_t blocks = run.names.size();
  chain_.resize(blocks);
  for (std::size_t from = 0, to = 0; from < blocks; from = ++to) {
    std::optional<std::uint64_t> known;
    for (to = run.tier == 0 ? blocks : from; to < blocks; ++to) {
      if (const BlockNames::Known entry = names_.find(run.names[to])) {
        known = entry.chain();
        break;
      }
    }
    hash_blocks(run, from, to, seed);
    if (known) seed = chain_[to] = *known;
  }
  return chain_;
}

// Computes the chain hashes of some of the run's blocks. `seed`: the one before them.
void WorkerBlocks::hash_blocks(const Stored& run, std::size_t from, std::size_t to,
                               std::uint64_t seed) {
  const std::size_t at = from * block_size_;
  if (run.extras.empty()) {
    if (run.wide.empty()) {
      chain_hashes(run.tokens.data() + at, block_size_, to - from, seed, &chain_[from]);
    } else {
      chain_hashes(run.wide.data() + at, block_size_, to - from, seed, &chain_[from], bytes_);
    }
    return;
  }
  for (std::size_t i = from; i < to; ++i) {
    const std::size_t begin = i * block_size_;
    seed = run.wide.empty() ? chain_hash(seed, run.tokens.data() + begin, block_size_,
                                         run.extras[i], bytes_)
                            : chain_hash(seed, run.wide.data() + begin, block_size_,
                                         run.extras[i], bytes_);
    chain_[i] = seed;
  }
}

// One block after another: stored, once what its name stood for before was dropped.
void WorkerBlocks::hold(Names names, Names chain, std::uint8_t tier, bool counts_copies) {
  const auto bit = static_cast<std::uint8_t>(1U << tier);
  for (std::size_t i = 0; i < std::min(kAhead, names.size()); ++i) names_.prefetch(names[i]);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i + kAhead < names.size()) names_.prefetch(names[i + kAhead]);
    BlockNames::Known known = names_.at(names[i]);
    const std::uint8_t tiers = known.tiers();
    const bool renamed = tiers != 0 && known.chain() != chain[i];
    const bool is_chunk = !chunks_.empty() && chunks_.contains(names[i]);
    const std::uint64_t before = renamed ? known.chain() : 0;
    known.set(chain[i], static_cast<std::uint8_t>(renamed ? bit : tiers | bit));
    if (renamed) unname(before, names[i]);
    if (is_hybrid_) by_chain_.at(chain[i]).set(names[i], 1);
    if (is_hybrid_) tell_end(chain[i], names[i]);
    if (renamed) {
      leave(before, tiers);
      for (CopiesInTier& copies : copies_) copies.erase(names[i]);
      if (is_chunk) forget_chunk(names[i], tiers);
    } else if (counts_copies && (tiers & bit) != 0) {
      ++copies_[tier][names[i]];
    }
    tell(Told::stored, tier, chain[i]);
    if (is_chunk && !renamed && (tiers & bit) == 0) hold_inner(names[i], tier);
  }
  if (tier == 0) counters_.stored_blocks += names.size();
}

void WorkerBlocks::leave(std::uint64_t chain, std::uint8_t tiers) {
  for (std::uint8_t tier = 0; tier < kTiers; ++tier) {
    if ((tiers >> tier & 1) == 0) continue;
    tell(Told::removed, tier, chain);
    if (tier == 0) left(chain);
  }
}

void WorkerBlocks::remove_named(Names names, std::uint8_t tier) {
  if (parked_.any()) parked_.evict(names, tier);
  drop(names, tier);
}

void WorkerBlocks::drop(Names names, std::uint8_t tier) {
  const auto bit = static_cast<std::uint8_t>(1U << tier);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i + kAhead < names.size()) names_.prefetch(names[i + kAhead]);
    BlockNames::Known known = names_.find(names[i]);
    if (!known || (known.tiers() & bit) == 0 || drop_copy(names[i], tier)) continue;
    tell(Told::removed, tier, known.chain());
    if (tier == 0) left(known.chain());
    const bool is_last = known.tiers() == bit;
    if (is_last) {
      unname(known.chain(), names[i]);
      names_.erase(known);
    } else {
      known.set_tiers(static_cast<std::uint8_t>(known.tiers() & ~bit));
    }
    if (chunks_.empty()) continue;
    drop_inner(names[i], tier);
    if (is_last) chunks_.erase(names[i]);
  }
}

// Whether another copy of the block stays.
bool WorkerBlocks::drop_copy(std::uint64_t name, std::uint8_t tier) {
  CopiesInTier& copies = copies_[tier];
  if (copies.empty()) return false;
  const auto found = copies.find(name);
  if (found == copies.end()) return false;
  if (--found->second == 0) copies.erase(found);
  if (tier == 0) ++counters_.removed_blocks;
  return true;
}

void WorkerBlocks::forget() {
  forget_blocks();
  groups_.forget();
}

void WorkerBlocks::forget_blocks() {
  by_chain_.clear();
  if (ends_ != nullptr) ends_->clear_worker(worker_);
  pending_.clear();  // all of it is this worker's
  index_.clear_worker(worker_);
  names_.clear();
  chunks_.clear();
  for (CopiesInTier& copies : copies_) copies.clear();
  parked_.clear();
}

void WorkerBlocks::tell(Told told, std::uint8_t tier, std::uint64_t chain) {
  if (told != pending_told_ || tier != pending_tier_ || pending_.size() >= kMostPending) {
    tell_all();
    pending_told_ = told;
    pending_tier_ = tier;
  }
  pending_.push_back(chain);
}

void WorkerBlocks::left(std::uint64_t chain) {
  ++counters_.removed_blocks;
  left_.push_back(chain);
}

void WorkerBlocks::tell_all() {
  if (pending_.empty()) return;
  if (pending_told_ == Told::stored) {
    index_.store(worker_, pending_, pending_tier_);
  } else {
    index_.remove(worker_, pending_, pending_tier_);
  }
  pending_.clear();
}

}  // namespace kv
