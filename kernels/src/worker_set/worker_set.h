// Who holds a block, as a set of seats in one word: small for unique blocks, dense for shared
// ones. The form follows the seats: up to four in the word, then a sorted array while that is
// smaller than a sparse bitmap; back again with some slack, so that a set at the edge of two forms
// does not flap. Not thread-safe: readers may look while nobody changes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/prefetch.h"
#include "worker_set/set_pool.h"
#include "worker_set/set_word.h"
#include "worker_set/worker_set_array.h"
#include "worker_set/worker_set_bitmap.h"
#include "worker_set/worker_set_lanes.h"

namespace kv {

class WorkerSets {
 public:
  static constexpr std::size_t kMostSeats = 64 * BitmapForm::kChunkBits - 2;  // 8191: no seat

  // A word for these seats, ascending, cold.
  std::uint64_t make(std::span<const std::uint16_t> sorted);

  // Adds the seat; false if it was there.
  bool insert(std::uint64_t& word, unsigned seat);

  // Takes the seat out; false if it was not there. The set may be empty then.
  bool erase(std::uint64_t& word, unsigned seat);

  // Gives the memory back and leaves the set empty.
  void drop(std::uint64_t& word);

  bool contains(std::uint64_t word, unsigned seat) const;
  static bool empty(std::uint64_t word) {
    return form_of(word) == SetForm::lanes && (word & kContent) == kContent;
  }

  // Calls see(seat) for each.
  template <class See>
  void each(std::uint64_t word, See see) const {
    switch (form_of(word)) {
      case SetForm::none: break;
      case SetForm::lanes:
        for (unsigned lane = 0; lane < lanes::kMost; ++lane) {
          const unsigned seat = lanes::seat(word, lane);
          if (seat == lanes::kNoSeat) break;
          see(seat);
        }
        break;
      case SetForm::array:
        for (const std::uint16_t seat : array(word)) see(unsigned{seat});
        break;
      case SetForm::bitmap: each_bit(bitmap(word), see);
    }
  }

  ArrayForm array(std::uint64_t word) const { return ArrayForm(pool_.at(word & kContent)); }
  BitmapForm bitmap(std::uint64_t word) const { return BitmapForm(pool_.at(word & kContent)); }

  // Brings near what look-ups read of the set.
  KV_PREFETCHES void prefetch(std::uint64_t word) const {
    if (form_of(word) <= SetForm::lanes) return;
    const std::uint64_t* piece = pool_.at(word & kContent);
    prefetch_line(piece);
    if (form_of(word) == SetForm::array) prefetch_line(piece + 8);  // the next cache line
    if (form_of(word) == SetForm::array) prefetch_line(piece + 16);
  }

  std::size_t memory_bytes() const { return pool_.memory_bytes(); }
  std::size_t used_bytes() const { return pool_.used_bytes(); }

 private:
  static constexpr std::size_t kSlackUnits = 2;
  static constexpr std::size_t kBackToLanes = 3;
  static constexpr std::size_t kMostInArray = SetPool::kMostUnits * 4;

  template <class See>
  static void each_bit(const BitmapForm& map, See see) {
    for (std::uint64_t left = map.summary(); left != 0; left &= left - 1) {
      const auto chunk = static_cast<unsigned>(std::countr_zero(left));
      for (unsigned half = 0; half < BitmapForm::kChunkWords; ++half) {
        for (std::uint64_t bits = map.chunk(chunk)[half]; bits != 0; bits &= bits - 1) {
          see(chunk * BitmapForm::kChunkBits + 64 * half +
              static_cast<unsigned>(std::countr_zero(bits)));
        }
      }
    }
  }

  bool insert_in_array(std::uint64_t& word, unsigned seat);
  bool insert_in_bitmap(std::uint64_t& word, unsigned seat);
  bool erase_in_array(std::uint64_t& word, unsigned seat);
  bool erase_in_bitmap(std::uint64_t& word, unsigned seat);
  void remake(std::uint64_t& word, std::span<const std::uint16_t> sorted);
  std::size_t seats_of(std::uint64_t word, std::span<std::uint16_t> into) const;
  void resize_bitmap(std::uint64_t& word, std::size_t before_units, std::size_t units);

  SetPool pool_;
};

}  // namespace kv
