// What an engine's names of blocks stand for: name -> chain hash, and the tiers that hold it. An
// open-addressing table in groups of eight slots, each with a byte of its own that lies with its
// group's in one word: most look-ups of a name that is not there read no slot at all (as Abseil's
// "Swiss tables", 2017). 17 bytes a slot, between 53.5 and 80 % full whatever happened to it, so
// at most 32 bytes a name (beyond the first few). Lifetime: worker.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/prefetch.h"

namespace kv {

class BlockNames {
  struct Slot {
    std::uint64_t name;
    std::uint64_t chain;
  };
  static constexpr std::uint8_t kTierBits = 0x07;  // of a slot's byte; the rest is of the name
  static constexpr std::size_t kSlotsInGroup = 8;

  struct alignas(64) Group {  // two cache lines
    Slot slots[kSlotsInGroup];
  };

  // The memory of one size of the table.
  struct Room {
    explicit Room(std::size_t slots);
    Room(const Room& other);
    Room(Room&&) = default;
    Room& operator=(Room&&) = default;

    std::size_t groups;
    std::unique_ptr<std::uint64_t[]> bytes;  // a word a group, a byte a slot; its tiers 0: empty
    std::unique_ptr<Group[]> slots;
  };

 public:
  // One name's entry; nobody's where it tests false. Void after the next change of the table.
  class Known {
   public:
    explicit operator bool() const { return slot_ != nullptr; }
    std::uint64_t name() const { return slot_->name; }
    std::uint64_t chain() const { return slot_->chain; }
    std::uint8_t tiers() const { return *byte_ & kTierBits; }  // bit t: held in tier t

    // `tiers`: at least one.
    void set_tiers(std::uint8_t tiers) { *byte_ = tag_ | tiers; }
    void set(std::uint64_t chain, std::uint8_t tiers) {
      slot_->chain = chain;
      set_tiers(tiers);
    }

   private:
    friend class BlockNames;
    Known() = default;
    Known(Slot* slot, std::uint8_t* byte, std::uint8_t tag) : slot_(slot), byte_(byte), tag_(tag) {}

    Slot* slot_ = nullptr;
    std::uint8_t* byte_ = nullptr;
    std::uint8_t tag_ = 0;
  };

  BlockNames();

  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const {
    return room_.groups * (sizeof(std::uint64_t) + sizeof(Group));
  }

  // Brings near what a search for the name reads first.
  KV_PREFETCHES void prefetch(std::uint64_t name) const {
    const std::size_t group = home(mix(name));
    prefetch_line(&room_.bytes[group]);
    prefetch_line(&room_.slots[group].slots[0]);
    prefetch_line(&room_.slots[group].slots[kSlotsInGroup / 2]);
  }

  Known find(std::uint64_t name) const {
    const std::uint64_t mixed = mix(name);
    const std::uint8_t tag = tag_of(mixed);
    for (std::size_t group = home(mixed);; group = next(group)) {
      if (const Known known = find_in(group, name, tag)) return known;
      if (empty(room_.bytes[group]) != 0) return {};
    }
  }

  // The entry of a name, made if there is none; then its tiers are 0, and must be set at once.
  Known at(std::uint64_t name) {
    if ((size_ + 1) * 5 > room_.groups * kSlotsInGroup * 4) {
      resize((size_ + 1) * kSlotsPer100 / 100);
    }
    const std::uint64_t mixed = mix(name);
    const std::uint8_t tag = tag_of(mixed);
    for (std::size_t group = home(mixed);; group = next(group)) {
      if (const Known known = find_in(group, name, tag)) return known;
      const std::uint64_t free = empty(room_.bytes[group]);
      if (free == 0) continue;
      const Known made = entry(group, first(free), tag);
      made.slot_->name = name;
      ++size_;
      return made;
    }
  }

  // Takes out an entry that `find` gave.
  void erase(const Known& known);

  void clear();

  template <class Take>
  void each(Take take) const {
    for (std::size_t group = 0; group < room_.groups; ++group) {
      for (std::uint64_t left = ~empty(room_.bytes[group]) & kTops; left != 0; left &= left - 1) {
        take(entry(group, first(left), 0));
      }
    }
  }

 private:
  static_assert(std::endian::native == std::endian::little, "a group's first byte is the lowest");

  static constexpr std::size_t kLeastSlots = 16;
  static constexpr std::size_t kSlotsPer100 = 184;  // after growth: 54 % are full
  static constexpr std::uint64_t kOnes = 0x0101010101010101;
  static constexpr std::uint64_t kTops = 0x80 * kOnes;

  // Of a word of bytes below 0x80: the top bit of each that is not 0.
  static std::uint64_t filled(std::uint64_t bytes) { return (bytes + 0x7F * kOnes) & kTops; }
  static std::uint64_t empty(std::uint64_t bytes) {
    return ~filled(bytes & kTierBits * kOnes) & kTops;
  }
  static std::size_t first(std::uint64_t tops) {
    return static_cast<std::size_t>(std::countr_zero(tops)) / 8;
  }

  std::uint8_t* byte(std::size_t group, std::size_t slot) const {
    return reinterpret_cast<std::uint8_t*>(&room_.bytes[group]) + slot;
  }
  Known entry(std::size_t group, std::size_t slot, std::uint8_t tag) const {
    return {&room_.slots[group].slots[slot], byte(group, slot), tag};
  }

  Known find_in(std::size_t group, std::uint64_t name, std::uint8_t tag) const {
    const std::uint64_t bytes = room_.bytes[group];
    const std::uint64_t other = filled((bytes ^ tag * kOnes) >> 3 & 0x1F * kOnes);
    for (std::uint64_t like = ~(other | empty(bytes)) & kTops; like != 0; like &= like - 1) {
      const Known known = entry(group, first(like), tag);
      if (known.name() == name) return known;
    }
    return {};
  }

  std::size_t next(std::size_t group) const { return group + 1 == room_.groups ? 0 : group + 1; }

  // Keyed, so that nobody outside can make names that all want one group.
  std::uint64_t mix(std::uint64_t name) const {
    std::uint64_t mixed = (name ^ key_) * 0x9E3779B97F4A7C15ULL;
    mixed = (mixed ^ std::rotl(mixed, 32)) * key_;
    return mixed ^ mixed >> 29;
  }
  static std::uint8_t tag_of(std::uint64_t mixed) {
    return static_cast<std::uint8_t>(mixed & static_cast<std::uint8_t>(~kTierBits));
  }
  // Keeps the order of mixed names: growing reads and writes the groups in order.
  std::size_t home(std::uint64_t mixed) const {
    return static_cast<std::size_t>((static_cast<unsigned __int128>(mixed) * room_.groups) >> 64);
  }

  void resize(std::size_t slots);

  std::uint64_t key_;  // odd
  std::size_t size_ = 0;
  Room room_;
};

}  // namespace kv
