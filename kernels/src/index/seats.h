// Worker slots and the seats they sit on. Worker sets name seats, so that clearing a worker needs
// no look at the blocks it held: it takes another seat, and nobody counts the old one any more.
// An old seat is used again once no set names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

class Seats {
 public:
  explicit Seats(std::size_t workers);

  unsigned of(std::size_t worker) const { return seat_of_[worker]; }
  std::size_t worker_on(unsigned seat) const { return worker_on_[seat]; }
  bool live(unsigned seat) const { return (live_[seat / 64] >> (seat % 64) & 1) != 0; }
  const std::uint64_t* live_words() const { return live_.data(); }
  std::size_t size() const { return worker_on_.size(); }
  std::size_t workers() const { return seat_of_.size(); }

  bool has_spare() const { return !spare_.empty(); }

  // Moves the worker to a spare seat. Precondition: has_spare().
  void change(std::size_t worker);

  // No set names the seat any more.
  void free(unsigned seat) { spare_.push_back(static_cast<std::uint16_t>(seat)); }

  std::size_t memory_bytes() const;

 private:
  void sit(std::size_t worker, unsigned seat);

  std::vector<std::uint16_t> seat_of_;
  std::vector<std::uint16_t> worker_on_;  // meaningless for seats that are not live
  std::vector<std::uint64_t> live_;       // a bit a seat, of an even number of words
  std::vector<std::uint16_t> spare_;
};

}  // namespace kv
