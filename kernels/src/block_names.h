// What an engine's names of blocks stand for: name -> chain hash, and the tiers that hold it. An
// open-addressing table of 17 bytes a slot, between 53.5 and 80 % full whatever happened to it, so
// at most 32 bytes a name (beyond the first few). Lifetime: worker.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace kv {

class BlockNames {
 public:
  // In bytes, which need no alignment: padding would cost seven of them.
  class Known {
   public:
    std::uint64_t name() const { return get(0); }
    std::uint64_t chain() const { return get(kWord); }
    std::uint8_t tiers() const { return bytes_[2 * kWord]; }  // bit t: held in tier t; 0: empty
    void set_name(std::uint64_t name) { std::memcpy(bytes_, &name, kWord); }
    void set(std::uint64_t chain, std::uint8_t tiers) {
      std::memcpy(bytes_ + kWord, &chain, kWord);
      set_tiers(tiers);
    }
    void set_tiers(std::uint8_t tiers) { bytes_[2 * kWord] = tiers; }

   private:
    static constexpr std::size_t kWord = sizeof(std::uint64_t);

    std::uint64_t get(std::size_t at) const {
      std::uint64_t word;
      std::memcpy(&word, bytes_ + at, kWord);
      return word;
    }

    std::uint8_t bytes_[2 * kWord + 1] = {};
  };

  BlockNames();

  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const { return slots_.capacity() * sizeof(Known); }

  void prefetch(std::uint64_t name) const {
    const auto* at = reinterpret_cast<const char*>(slots_.data() + home(name));
    __builtin_prefetch(at);
    __builtin_prefetch(at + 64);
  }

  // The entry of a name, or nullptr. Valid until the next change.
  Known* find(std::uint64_t name) {
    return const_cast<Known*>(std::as_const(*this).find(name));
  }

  const Known* find(std::uint64_t name) const {
    for (std::size_t at = home(name);; at = next(at)) {
      if (slots_[at].tiers() == 0) return nullptr;
      if (slots_[at].name() == name) return &slots_[at];
    }
  }

  // The entry of a name, made if there is none; then its tiers are 0, and must be set at once.
  Known& at(std::uint64_t name) {
    if ((size_ + 1) * 5 > slots_.size() * 4) resize((size_ + 1) * kSlotsPer100 / 100);
    std::size_t at = home(name);
    while (slots_[at].tiers() != 0 && slots_[at].name() != name) at = next(at);
    if (slots_[at].tiers() == 0) {
      slots_[at].set_name(name);
      ++size_;
    }
    return slots_[at];
  }

  // Takes out an entry that `find` gave.
  void erase(const Known* entry);

  void clear();

  template <class Take>
  void each(Take take) const {
    for (const Known& known : slots_) {
      if (known.tiers() != 0) take(known);
    }
  }

 private:
  static constexpr std::size_t kLeastSlots = 16;

  static constexpr std::size_t kSlotsPer100 = 184;  // after growth: 54 % are full

  std::size_t next(std::size_t at) const { return at + 1 == slots_.size() ? 0 : at + 1; }

  // Keeps the order of mixed names: growing reads and writes the slots in order. Keyed, so that
  // nobody outside can make names that all want one slot.
  std::size_t home(std::uint64_t name) const {
    std::uint64_t mixed = (name ^ key_) * 0x9E3779B97F4A7C15ULL;
    mixed = (mixed ^ std::rotl(mixed, 32)) * key_;
    mixed ^= mixed >> 29;
    return static_cast<std::size_t>((static_cast<unsigned __int128>(mixed) * slots_.size()) >> 64);
  }

  void resize(std::size_t slots);

  std::uint64_t key_;  // odd
  std::size_t size_ = 0;
  std::vector<Known> slots_;
};

}  // namespace kv
