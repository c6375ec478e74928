// The dense form of a worker set: a sparse bitmap in a piece of the pool. Layout: one summary
// word that says which chunks of 128 seats have any, then the two words of each such chunk.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

class BitmapForm {
 public:
  static constexpr unsigned kChunkBits = 128;
  static constexpr unsigned kChunkWords = 2;

  static constexpr std::size_t units_for(std::size_t chunks) { return 1 + kChunkWords * chunks; }

  static std::size_t chunks_of(std::span<const std::uint16_t> sorted) {
    std::uint64_t summary = 0;
    for (const std::uint16_t seat : sorted) summary |= bit(seat / kChunkBits);
    return static_cast<std::size_t>(std::popcount(summary));
  }

  explicit BitmapForm(std::uint64_t* piece) : words_(piece) {}

  void fill(std::span<const std::uint16_t> sorted) {
    words_[0] = 0;
    for (const std::uint16_t seat : sorted) {  // ascending: a new chunk is always the last
      if ((words_[0] & bit(seat / kChunkBits)) == 0) add_chunk(seat);
      word(seat) |= bit(seat % 64);
    }
  }

  std::uint64_t summary() const { return words_[0]; }
  std::size_t chunks() const { return static_cast<std::size_t>(std::popcount(words_[0])); }
  std::size_t units() const { return units_for(chunks()); }
  std::size_t size() const {
    std::size_t seats = 0;
    for (std::size_t i = 1; i < units(); ++i) {
      seats += static_cast<std::size_t>(std::popcount(words_[i]));
    }
    return seats;
  }

  // The two words of a chunk that is there.
  const std::uint64_t* chunk(unsigned chunk) const { return words_ + at(chunk); }

  bool has_chunk(unsigned seat) const { return (words_[0] & bit(seat / kChunkBits)) != 0; }
  bool contains(unsigned seat) const {
    return has_chunk(seat) && (words_[at(seat / kChunkBits) + half(seat)] & bit(seat % 64)) != 0;
  }

  // The 64 seats around this one, whose chunk is there.
  std::uint64_t& word(unsigned seat) { return words_[at(seat / kChunkBits) + half(seat)]; }

  // The piece must have two units more than units().
  void add_chunk(unsigned seat) {
    std::uint64_t* place = words_ + at(seat / kChunkBits);
    std::copy_backward(place, words_ + units(), words_ + units() + kChunkWords);
    std::fill_n(place, kChunkWords, 0);
    words_[0] |= bit(seat / kChunkBits);
  }

  bool chunk_is_empty(unsigned seat) const {
    const std::uint64_t* words = chunk(seat / kChunkBits);
    return (words[0] | words[1]) == 0;
  }

  void drop_chunk(unsigned seat) {
    std::uint64_t* place = words_ + at(seat / kChunkBits);
    std::copy(place + kChunkWords, words_ + units(), place);
    words_[0] &= ~bit(seat / kChunkBits);
  }

 private:
  static constexpr std::uint64_t bit(unsigned index) { return std::uint64_t{1} << index; }
  static constexpr std::size_t half(unsigned seat) { return seat / 64 % kChunkWords; }
  std::size_t at(unsigned chunk) const {
    const std::uint64_t before = words_[0] & (bit(chunk) - 1);
    if (before == 0) return 1;  // most sets have one chunk; a popcount may be a call
    return 1 + kChunkWords * static_cast<std::size_t>(std::popcount(before));
  }

  std::uint64_t* words_;
};

}  // namespace kv
