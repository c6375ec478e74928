// One look-up: the seats that held every block of the chain so far, and how deep each got.
// Lifetime: request (one call); readers share nothing here.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "index/seats.h"
#include "worker_set/worker_set.h"

namespace kv {

// Some seats as 64 chunks of 128 bits, of which only the ones named in `summary` are set up.
struct SeatBits {
  static constexpr unsigned kWords = BitmapForm::kChunkWords;

  std::uint64_t summary = 0;
  std::array<std::uint64_t, 64 * kWords> words;

  SeatBits() = default;
  SeatBits(const SeatBits& other) { *this = other; }
  SeatBits& operator=(const SeatBits& other) {
    summary = other.summary;
    for (std::uint64_t left = summary; left != 0; left &= left - 1) {
      const std::size_t at = kWords * static_cast<std::size_t>(std::countr_zero(left));
      words[at] = other.words[at];
      words[at + 1] = other.words[at + 1];
    }
    return *this;
  }

  std::uint64_t* chunk(unsigned number) { return &words[kWords * number]; }

  bool has(unsigned seat) const {
    return (summary >> (seat / BitmapForm::kChunkBits) & 1) != 0 &&
           (words[seat / 64] >> (seat % 64) & 1) != 0;
  }

  bool empty() const { return summary == 0; }
  void clear() { summary = 0; }

  // Those of these seats that are in the set. Precondition: no chunk is empty; nor is one then.
  SeatBits kept(const WorkerSets& sets, std::uint64_t word) const {
    SeatBits kept;
    if (form_of(word) != SetForm::bitmap) {
      sets.each(word, [&](unsigned seat) {
        if (has(seat)) kept.add(seat);
      });
      return kept;
    }
    const BitmapForm map = sets.bitmap(word);
    for (std::uint64_t left = summary & map.summary(); left != 0; left &= left - 1) {
      const auto number = static_cast<unsigned>(std::countr_zero(left));
      const std::size_t at = std::size_t{kWords} * number;
      const std::uint64_t low = words[at] & map.chunk(number)[0];
      const std::uint64_t high = words[at + 1] & map.chunk(number)[1];
      if ((low | high) == 0) continue;
      kept.summary |= std::uint64_t{1} << number;
      kept.words[at] = low;
      kept.words[at + 1] = high;
    }
    return kept;
  }

  void remove(unsigned seat) {
    const unsigned number = seat / BitmapForm::kChunkBits;
    words[seat / 64] &= ~(std::uint64_t{1} << (seat % 64));
    if ((chunk(number)[0] | chunk(number)[1]) == 0) summary &= ~(std::uint64_t{1} << number);
  }

  template <class See>
  void each(See see) const {
    for (std::uint64_t left = summary; left != 0; left &= left - 1) {
      const auto number = static_cast<unsigned>(std::countr_zero(left));
      for (unsigned half = 0; half < kWords; ++half) {
        for (std::uint64_t bits = words[kWords * number + half]; bits != 0; bits &= bits - 1) {
          see(number * BitmapForm::kChunkBits + 64 * half +
              static_cast<unsigned>(std::countr_zero(bits)));
        }
      }
    }
  }

  void open(unsigned number) {
    if ((summary >> number & 1) != 0) return;
    summary |= std::uint64_t{1} << number;
    chunk(number)[0] = chunk(number)[1] = 0;
  }

  void add(unsigned seat) {
    open(seat / BitmapForm::kChunkBits);
    words[seat / 64] |= std::uint64_t{1} << (seat % 64);
  }

  void add(const WorkerSets& sets, std::uint64_t word) {
    if (form_of(word) != SetForm::bitmap) {
      sets.each(word, [this](unsigned seat) { add(seat); });
      return;
    }
    const BitmapForm map = sets.bitmap(word);
    for (std::uint64_t left = map.summary(); left != 0; left &= left - 1) {
      const auto number = static_cast<unsigned>(std::countr_zero(left));
      open(number);
      for (unsigned half = 0; half < kWords; ++half) {
        chunk(number)[half] |= map.chunk(number)[half];
      }
    }
  }
};

class PrefixWalk {
 public:
  // `hits`: a number for each worker, which the walk raises.
  PrefixWalk(const WorkerSets& sets, const Seats& seats, std::int32_t* hits)
      : sets_(sets), seats_(seats), hits_(hits) {}

  // The first block's set. False if none of its seats is in use.
  bool start(std::uint64_t word);
  bool start(const SeatBits& held);

  // The set of block `depth`, counted from 0; who is not in it holds `depth` blocks. False when
  // nobody is left.
  bool keep(std::uint64_t word, std::int32_t depth);
  bool keep(SeatBits& held, std::int32_t depth);

  // The chain ends: who is left holds `depth` blocks.
  void finish(std::int32_t depth);

  bool over() const { return count_ == 0; }

 private:
  static constexpr std::size_t kMostListed = SetPool::kMostUnits * 4;

  bool same_array(std::uint64_t word, std::uint64_t last) const;
  template <class ChunkOf>
  bool keep_chunks(ChunkOf chunk_of, std::int32_t depth);
  bool keep_listed(const std::uint16_t* kept, std::size_t size, std::int32_t depth);

  const WorkerSets& sets_;
  const Seats& seats_;
  std::int32_t* hits_;
  SeatBits alive_;
  std::size_t count_ = 0;  // of alive_
  std::uint64_t last_ = 0;
};

}  // namespace kv
