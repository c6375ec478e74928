// One worker's blocks under its engine's own names, told to the index. What each member means is
// written at the oracle, `tests/oracles/worker_blocks.py`. Any thread may call any member.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "events/block_names.h"
#include "events/cache_groups.h"
#include "events/event_batch.h"
#include "events/worker_blocks_parked.h"
#include "index/prefix_index.h"

namespace kv {

// How often more than once each tier holds a name.
using CopiesInTier = std::unordered_map<std::uint64_t, std::uint32_t>;
using Copies = std::array<CopiesInTier, 3>;

// Of names that stand for several blocks: the chain hashes of all but the last of these.
using Chunks = std::unordered_map<std::uint64_t, std::vector<std::uint64_t>>;

// One worker's blocks as they were at a moment; nobody else has them. Lifetime: one dump.
struct FrozenBlocks {
  std::uint32_t block_size;
  std::string model;
  BlockNames names;
  Copies copies;
  ParkedBlocks parked;
  std::uint32_t group;
  bool full_attention;
  bool is_placed;
  CacheGroups groups;
  Chunks chunks;

  std::string dump() const;
};

// Lifetime: worker; the index must outlive it.
class WorkerBlocks {
 public:
  static constexpr int kTiers = std::tuple_size_v<Copies>;
  using Names = std::span<const std::uint64_t>;

  struct Counters {
    std::uint64_t stored_blocks = 0;
    std::uint64_t removed_blocks = 0;
    std::uint64_t clears = 0;
    std::uint64_t orphans = 0;
    // Events that changed nothing, by why.
    std::uint64_t other_group = 0;
    std::uint64_t other_block_size = 0;
    std::uint64_t unknown_names = 0;
    std::uint64_t no_room = 0;
    std::uint64_t masked = 0;
    std::uint64_t chunk_size = 0;
    // Events that tell tier 0's blocks by tokens, of this block size; `OtherSize` has the others.
    std::uint64_t own_size = 0;

    std::uint64_t skipped_events() const {
      return other_group + other_block_size + unknown_names + no_room + masked +
             chunk_size;
    }
  };

  // Events that tell tier 0's blocks by tokens, in blocks of another size. A block alone that is
  // smaller than ours may be the unfinished end of a prompt; all others are whole.
  struct OtherSize {
    std::uint32_t block_size = 0;  // 0: of more sizes than are told apart
    std::uint64_t whole = 0;
    std::uint64_t partial = 0;
  };
  static constexpr std::size_t kMostSizes = 8;

  // Blocks stored in a row; all of it borrowed.
  struct Stored {
    Names names;
    std::optional<std::uint64_t> parent;
    std::uint8_t tier = 0;
    std::optional<Names> chain;
    std::span<const std::int32_t> tokens;
    std::span<const std::string_view> extras;  // one a block, or none at all
    std::span<const std::int64_t> wide;        // instead of tokens, where one is beyond int32
    std::size_t unit = 1;                      // blocks a name; of more: outside tier 0, no extras
  };

  // Throws std::out_of_range for a worker that the index does not have.
  WorkerBlocks(PrefixIndex& index, std::int64_t worker, std::uint32_t block_size,
               std::string_view model, std::size_t max_parked, bool counts_copies);

  // Where in prompts a batch's blocks are, by their names; borrowed, of equal length.
  struct Placed {
    Names names;
    Names chain;
  };

  // The chain hashes that left tier 0 by it, in order; the same for `remove`.
  std::vector<std::uint64_t> apply(const EventBatch& batch, const Placed& placed = {});

  // By chain hashes, as many as names.
  void store(const Stored& run);

  // By tokens: block_size a name, or none where the names are known already.
  void store_tokens(const Stored& run, std::uint64_t seed);

  std::vector<std::uint64_t> remove(Names names, std::uint8_t tier);
  void clear();

  // Ascending, each once.
  std::vector<std::uint64_t> chains(int tier) const;

  std::string dump() const { return frozen().dump(); }

  // A copy, a tenth of the work of its dump.
  FrozenBlocks frozen() const;

  // Throws std::invalid_argument and changes nothing for bytes that `dump` did not write for a
  // worker of the same model and block size.
  void load(std::string_view data);

  // How many of the first `blocks` blocks of the chain the engine reuses, given that its
  // full-attention group holds them.
  std::size_t limit(Names chain, std::size_t blocks) const;
  bool is_hybrid() const;  // what `limit` says may be less than `blocks`
  bool has_full_attention() const;  // some event told of such a group

  // Tell `ends`, from now on, which blocks all windows (tier 0) and all states (tier 1) hold, so
  // that it can compute `limit` for many workers at once by `end_rule`. It must outlive this, or
  // be detached by nullptr.
  void attach(PrefixIndex* ends);
  // None: ask `limit`.
  std::optional<PrefixIndex::EndRule> end_rule() const;
  std::vector<CacheGroups::Facts> groups() const;

  std::size_t size() const;
  std::size_t parked() const;
  std::size_t memory_bytes() const;
  std::uint32_t block_size() const { return block_size_; }
  std::size_t worker() const { return static_cast<std::size_t>(worker_); }
  Counters counters() const;
  std::vector<OtherSize> other_sizes() const;  // in the order in which they were met

 private:
  void take_stored(const EventBatch& batch, const Event& event);
  void take_full_group(std::uint32_t group);
  bool take_group(const EventBatch& batch, const Event& event);
  bool take_placed(const EventBatch& batch, const Event& event);
  void take_removed(const EventBatch& batch, const Event& event);
  void name_chains();
  void tell_ends();
  void tell_end(std::uint64_t chain, std::uint64_t name);
  void tell_named(std::uint64_t name);
  void unname(std::uint64_t chain, std::uint64_t name);
  void note_size(const Event& event);
  void store_told(const Stored& run, std::uint64_t seed);
  void store_run(const Stored& run, std::uint64_t seed);
  void resolve(const Stored& run);
  bool place(const Stored& run, std::uint64_t seed, bool woken);
  void hold(Names names, Names chain, std::uint8_t tier, bool counts_copies);
  void drop(Names names, std::uint8_t tier);
  void remove_named(Names names, std::uint8_t tier);
  bool drop_copy(std::uint64_t name, std::uint8_t tier);
  void leave(std::uint64_t chain, std::uint8_t tiers);
  void forget();
  void forget_blocks();
  Names chain_of(const Stored& run, std::uint64_t seed);
  void hash_blocks(const Stored& run, std::size_t from, std::size_t to, std::uint64_t seed);
  bool are_known(const Stored& run) const;
  void hold_chunks(const Stored& run, std::uint64_t seed, bool counts_copies);
  void hold_inner(std::uint64_t chunk, std::uint8_t tier);
  void drop_inner(std::uint64_t chunk, std::uint8_t tier);
  void forget_chunk(std::uint64_t chunk, std::uint8_t tiers);
  void forget_chunks();

  // What the index must still be told, in order; told in one call where it is all alike.
  enum class Told : std::uint8_t { stored, removed };
  void tell(Told told, std::uint8_t tier, std::uint64_t chain);
  void tell_all();
  void left(std::uint64_t chain);

  mutable std::mutex mutex_;
  PrefixIndex& index_;
  std::int64_t worker_;
  std::uint32_t block_size_;
  std::string model_;
  BlockNames names_;
  bool counts_copies_;
  Copies copies_;
  Chunks chunks_;
  ParkedBlocks parked_;
  std::uint32_t group_ = 0;       // the cache group that counts
  bool full_attention_ = false;   // somebody told of such a group: it is `group_`
  CacheGroups groups_;
  bool is_placed_ = false;        // the blocks of windows alone have come with their places
  bool is_hybrid_ = false;        // it has groups that limit a hit, or that alone allow one
  BlockNames by_chain_;           // of a hybrid: chain hash -> name, as `names_` the other way
  PrefixIndex* ends_ = nullptr;   // tier 0: held by all windows, tier 1: by all states
  Counters counters_;
  std::vector<OtherSize> other_sizes_;

  Told pending_told_ = Told::stored;
  std::uint8_t pending_tier_ = 0;
  std::vector<std::uint64_t> pending_;
  std::vector<std::uint64_t> left_;    // tier 0, in this call
  std::vector<std::uint64_t> chain_;   // scratch, as the two that follow
  std::vector<std::uint8_t> bytes_;
  std::vector<Run> woken_;
  BlockNames placed_;  // of this batch
};

}  // namespace kv
