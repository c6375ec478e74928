#include "index/seats.h"

#include <algorithm>

#include "worker_set/worker_set.h"

namespace kv {
namespace {

// As many spare seats as workers: each could be cleared once before old seats must be given back.
constexpr std::size_t kLeastSpare = 62;

std::size_t seats_for(std::size_t workers) {
  return std::min(WorkerSets::kMostSeats, workers + std::max(workers, kLeastSpare));
}

}  // namespace

Seats::Seats(std::size_t workers)
    : seat_of_(workers),
      worker_on_(seats_for(workers)),
      live_((worker_on_.size() + 127) / 128 * 2) {
  for (std::size_t worker = 0; worker < workers; ++worker) {
    sit(worker, static_cast<unsigned>(worker));
  }
  for (std::size_t seat = worker_on_.size(); seat-- > workers;) free(static_cast<unsigned>(seat));
}

void Seats::change(std::size_t worker) {
  const unsigned old = of(worker);
  live_[old / 64] &= ~(std::uint64_t{1} << (old % 64));
  sit(worker, spare_.back());
  spare_.pop_back();
}

std::size_t Seats::memory_bytes() const {
  return (seat_of_.capacity() + worker_on_.capacity() + spare_.capacity()) * 2 +
         live_.capacity() * 8;
}

void Seats::sit(std::size_t worker, unsigned seat) {
  seat_of_[worker] = static_cast<std::uint16_t>(seat);
  worker_on_[seat] = static_cast<std::uint16_t>(worker);
  live_[seat / 64] |= std::uint64_t{1} << (seat % 64);
}

}  // namespace kv
