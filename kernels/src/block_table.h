// An open-addressing table from a 64-bit block hash to a bitset of workers, and the clock that
// finds its coldest entry. Not thread-safe: PrefixIndex holds the lock.
//
// Layout: one control byte a slot (0 = empty, else occupied bit, 2 bits of warmth, 5 bits of the
// mixed hash), probed linearly, and one flat record a slot, [hash, set words...]. A probe mostly
// touches one line of each. Deletion shifts the followers back, so no tombstones are left to
// slow down later probes. Every 64-bit key is legal: emptiness lives in the control byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kv {

class BlockTable {
 public:
  struct Place {
    std::size_t slot;
    bool occupied;  // false: the hash is absent and `slot` is where it would go
  };

  // `set_words`: 64-bit words of one bitset. `max_entries`: the table never holds more.
  BlockTable(std::size_t set_words, std::size_t max_entries);

  // Call before a run of probes some steps ahead: brings both lines of `hash` near.
  void prefetch(std::uint64_t hash) const;

  Place locate(std::uint64_t hash) const;

  // Makes room for one more entry. Returns true if the table was laid out anew, which voids
  // every slot found before. Precondition: size() < max_entries.
  bool make_room();

  // Fills the empty `slot` that locate(hash) gave, with an empty set.
  void occupy(std::size_t slot, std::uint64_t hash);

  // Empties the slot; a follower may take its place, so look at `slot` again in a sweep.
  void erase(std::size_t slot);

  // Erases the first entry, in clock order, whose warmth is used up; each pass of the hand takes
  // one away (GCLOCK: A. Smith, "Sequentiality and Prefetching in Database Systems", 1978).
  // `before_erase` sees its set. Precondition: size() > 0.
  template <class BeforeErase>
  void evict_coldest(BeforeErase before_erase) {
    const std::size_t slot = coldest();
    before_erase(set(slot));
    erase(slot);
  }

  // Counts a use of the entry, up to three: what is asked for again and again outlives a long
  // run of blocks that are stored once.
  void warm(std::size_t slot) {
    if ((control_[slot] & kWarmth) != kWarmth) control_[slot] += kOneUse;
  }
  bool occupied(std::size_t slot) const { return control_[slot] != 0; }
  std::uint64_t* set(std::size_t slot) { return &records_[slot * stride_ + 1]; }
  const std::uint64_t* set(std::size_t slot) const { return &records_[slot * stride_ + 1]; }

  std::uint64_t key(std::size_t slot) const { return records_[slot * stride_]; }
  std::size_t size() const { return size_; }
  std::size_t slots() const { return control_.size(); }
  std::size_t memory_bytes() const;

 private:
  static constexpr std::uint8_t kOccupied = 0x80;
  static constexpr std::uint8_t kWarmth = 0x60;
  static constexpr std::uint8_t kOneUse = 0x20;
  static constexpr std::uint8_t kTag = 0x1F;

  static std::uint64_t mix(std::uint64_t hash);
  static std::uint8_t cold_control(std::uint64_t mixed);
  std::size_t home(std::uint64_t mixed) const;
  std::size_t next(std::size_t slot) const { return slot + 1 == slots() ? 0 : slot + 1; }
  std::size_t coldest();
  void move_record(std::size_t from, std::size_t to);
  void rehash(std::size_t slots);

  std::size_t stride_;     // words of a record: the hash and its set
  std::size_t max_slots_;  // what max_entries need at the highest load
  std::size_t size_ = 0;
  // The clock's hand leaps by about the golden section of the table, coprime to its size, so it
  // still comes by every slot once a round. Going slot by slot it would clear the table behind
  // it while new blocks, spread evenly, crowd what lies ahead into ever longer clusters.
  std::size_t hand_ = 0;
  std::size_t leap_;
  std::vector<std::uint8_t> control_;
  std::unique_ptr<std::uint64_t[]> records_;  // unset where the slot is empty
};

}  // namespace kv
