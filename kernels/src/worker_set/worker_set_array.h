// The middle form of a worker set: seats as sorted 16-bit numbers in a piece of the pool.
// Layout: u16 count, u16 units of the piece, then the seats.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

using Lane16 [[gnu::may_alias]] = std::uint16_t;  // the pool hands out 64-bit words

class ArrayForm {
 public:
  static constexpr std::size_t units_for(std::size_t seats) { return (seats + kHead + 3) / 4; }

  explicit ArrayForm(std::uint64_t* piece) : lanes_(reinterpret_cast<Lane16*>(piece)) {}

  void fill(std::span<const std::uint16_t> sorted, std::size_t units) {
    lanes_[0] = static_cast<std::uint16_t>(sorted.size());
    lanes_[1] = static_cast<std::uint16_t>(units);
    std::copy(sorted.begin(), sorted.end(), begin());
  }

  std::size_t size() const { return lanes_[0]; }
  std::size_t units() const { return lanes_[1]; }
  bool full() const { return units_for(size() + 1) > units(); }
  Lane16* begin() const { return lanes_ + kHead; }
  Lane16* end() const { return begin() + size(); }

  bool contains(unsigned seat) const { return std::binary_search(begin(), end(), seat); }

  // Where the seat is, or would be.
  Lane16* place(unsigned seat) const { return std::lower_bound(begin(), end(), seat); }

  // Precondition: not full; `at` = place(seat).
  void insert(Lane16* at, unsigned seat) {
    std::copy_backward(at, end(), end() + 1);
    *at = static_cast<std::uint16_t>(seat);
    ++lanes_[0];
  }

  void erase(Lane16* at) {
    std::copy(at + 1, end(), at);
    --lanes_[0];
  }

 private:
  static constexpr std::size_t kHead = 2;

  Lane16* lanes_;
};

}  // namespace kv
