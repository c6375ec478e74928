// One worker's blocks by last use: an LRU stack (R. Mattson et al., "Evaluation Techniques for
// Storage Hierarchies", 1970). Its warm end is resident; colder blocks are only remembered, so
// that the bound between the two can be found wrong and moved. Not thread-safe: Mirror locks.
//
// One record a block in a flat array, linked by 32-bit numbers; an open-addressing table of such
// numbers, each beside 32 bits of the mixed hash, finds it. Probing, and shifting followers back
// when one goes, thus looks at the table only. Emptied records are used again before the array
// grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kv {

class Recency {
 public:
  using Hashes = std::span<const std::uint64_t>;

  // Consecutive blocks of a chain that were last used together. `stamp` 0: never seen.
  struct Run {
    std::size_t end;  // depth after its last block
    std::uint64_t stamp;
  };

  // What a chain met when it was touched.
  struct Met {
    std::size_t hit_blocks;  // leading blocks that were resident
    std::vector<Run> runs;   // of the leading blocks; at most kRuns, the last one of seen blocks
  };

  static constexpr std::size_t kRuns = 32;

  // Bounds: blocks resident, and all that are remembered (resident ones among them; no fewer
  // than `resident`). What no longer fits goes, coldest first. As for all that follows, blocks
  // that stop being resident are appended to `left`.
  void resize(std::size_t resident, std::size_t remembered, std::vector<std::uint64_t>& left);

  // Makes the chain's blocks the warmest, the first block above all and the last one below the
  // others; of a chain that is longer than what may be resident, its leading part. `stamp` is
  // larger than any before. Blocks that were not resident are appended to `fresh`.
  Met touch(Hashes chain, std::uint64_t stamp, std::vector<std::uint64_t>& fresh,
            std::vector<std::uint64_t>& left);

  // Drops from memory, too, those of the chain's blocks whose last use was `stamp`.
  void forget(Hashes chain, std::uint64_t stamp, std::vector<std::uint64_t>& left);

  // Blocks last used at `stamp` or before are resident no more.
  void drop_colder(std::uint64_t stamp, std::vector<std::uint64_t>& left);

  // Remembered blocks last used after `stamp` are resident after all, within the bound.
  void revive_warmer(std::uint64_t stamp, std::vector<std::uint64_t>& fresh);

  // Forgets all blocks and gives their memory back; the bounds stay.
  void clear();

  std::size_t resident() const { return resident_; }
  std::size_t size() const { return size_; }
  std::size_t most_remembered() const { return most_remembered_; }
  std::size_t memory_bytes() const;

 private:
  using Number = std::uint32_t;
  static constexpr Number kNone = 0xFFFFFFFF;
  static constexpr std::uint64_t kStamp = ~std::uint64_t{0} >> 1;

  struct Block {
    std::uint64_t hash;
    std::uint64_t stamp : 63;
    std::uint64_t resident : 1;
    Number warmer;
    Number colder;  // the next emptied record, in one of those
  };

  struct Entry {
    Number number;
    std::uint32_t tag;  // upper half of the mixed hash: where the entry would like to be
  };

  std::size_t home(std::uint32_t tag) const {
    return static_cast<std::size_t>((std::uint64_t{tag} * table_.size()) >> 32);
  }
  std::size_t next(std::size_t place) const { return place + 1 == table_.size() ? 0 : place + 1; }
  std::size_t place_of(std::uint64_t hash) const;  // in the table: its entry, or an empty one
  Number find(std::uint64_t hash) const;
  inline void prefetch(Hashes chain, std::size_t depth) const;
  void make_room(std::size_t more);
  Number add(std::uint64_t hash, Entry& entry);
  void unlink(Number number);
  void link_below(Number above, Number number);  // `above` kNone: as the warmest
  Met look_up(Hashes chain, std::vector<Number>& found) const;
  void settle(Number number, std::uint64_t stamp, std::vector<std::uint64_t>& fresh);
  void demote_coldest(std::vector<std::uint64_t>& left);
  void erase(Number number);
  void trim(std::size_t resident, std::size_t remembered, std::vector<std::uint64_t>& left);

  std::size_t most_resident_ = 0;
  std::size_t most_remembered_ = 0;
  std::size_t resident_ = 0;
  std::size_t size_ = 0;
  Number warmest_ = kNone;
  Number coldest_ = kNone;
  Number coldest_resident_ = kNone;
  Number free_ = kNone;  // first of the emptied records
  std::vector<Block> blocks_;
  std::vector<Entry> table_;
};

}  // namespace kv
