// Memory for worker sets that outgrow their word: pieces of 2..136 64-bit units, each size from
// slabs of its own, so that a slab which has emptied serves any other size (J. Bonwick, "The Slab
// Allocator", 1994). Not thread-safe: readers may call `at` while nobody allocates.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kv {

class SetPool {
 public:
  using Ref = std::uint64_t;  // of a piece: below 2^52

  SetPool() { partial_.fill(kNoSlab); }

  // The size of the piece that is given for so many units, at most kMostUnits.
  static constexpr std::size_t rounded(std::size_t units) {
    return units <= kExact ? units : (units + kStep - 1) / kStep * kStep;
  }

  // What is in the piece is undefined.
  Ref allocate(std::size_t units);
  void release(Ref ref, std::size_t units);

  std::uint64_t* at(Ref ref) const { return bases_[ref / kSlabUnits] + ref % kSlabUnits; }

  std::size_t memory_bytes() const;
  std::size_t used_bytes() const { return used_units_ * sizeof(std::uint64_t); }  // by pieces

  static constexpr std::size_t kMostUnits = 136;

 private:
  static constexpr std::size_t kSlabUnits = 2048;  // 16 KiB
  static constexpr std::size_t kExact = 32;
  static constexpr std::size_t kStep = 8;
  static constexpr std::uint32_t kNoSlab = ~std::uint32_t{0};
  static constexpr std::uint16_t kNoPiece = 0xFFFF;

  struct Slab {
    std::unique_ptr<std::uint64_t[]> words;
    std::uint16_t units = 0;          // of its pieces
    std::uint16_t used = 0;           // pieces given out
    std::uint16_t fresh = 0;          // pieces from here on were never given out
    std::uint16_t freed = kNoPiece;   // first of the returned ones, each names the next
    std::uint32_t before = kNoSlab;   // neighbours in the list of slabs with room
    std::uint32_t after = kNoSlab;

    bool full() const { return freed == kNoPiece && (fresh + 1U) * units > kSlabUnits; }
  };

  std::uint32_t open_slab(std::size_t units);
  void close_slab(std::uint32_t slab);
  void link(std::uint32_t slab);
  void unlink(std::uint32_t slab);

  std::size_t used_units_ = 0;
  std::vector<Slab> slabs_;
  std::vector<std::uint64_t*> bases_;           // slabs_[i].words, close together for readers
  std::vector<std::uint32_t> closed_;           // slab numbers without memory
  std::unique_ptr<std::uint64_t[]> spare_;      // one emptied slab, against thrashing
  std::array<std::uint32_t, kMostUnits + 1> partial_;  // by piece size: a slab with room
};

}  // namespace kv
