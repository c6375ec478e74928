#include "index/prefix_walk.h"

#include <algorithm>
#include <utility>

namespace kv {

bool PrefixWalk::start(std::uint64_t word) {
  last_ = word & ~kWarmth;
  sets_.each(word, [this](unsigned seat) {
    if (!seats_.live(seat)) return;
    alive_.add(seat);
    ++count_;
  });
  return count_ != 0;
}

bool PrefixWalk::start(const SeatBits& held) {
  for (unsigned seat = 0; seat < seats_.size(); ++seat) {
    if (!held.has(seat) || !seats_.live(seat)) continue;
    alive_.add(seat);
    ++count_;
  }
  return count_ != 0;
}

bool PrefixWalk::keep(std::uint64_t word, std::int32_t depth) {
  word &= ~kWarmth;
  // The same seats as before: nobody falls.
  if (word == last_ || same_array(word, std::exchange(last_, word))) return true;
  if (form_of(word) == SetForm::bitmap) {
    const BitmapForm map = sets_.bitmap(word);
    static constexpr std::uint64_t kNobody[SeatBits::kWords] = {};
    const std::uint64_t summary = map.summary();
    return keep_chunks(
        [&](unsigned number) {
          return (summary >> number & 1) != 0 ? map.chunk(number) : kNobody;
        },
        depth);
  }
  std::array<std::uint16_t, kMostListed> kept;
  std::size_t size = 0;
  sets_.each(word, [&](unsigned seat) {
    kept[size] = static_cast<std::uint16_t>(seat);
    if (alive_.has(seat)) ++size;
  });
  return size == count_ || keep_listed(kept.data(), size, depth);
}

bool PrefixWalk::same_array(std::uint64_t word, std::uint64_t last) const {
  if (form_of(word) != SetForm::array || form_of(last) != SetForm::array) return false;
  const ArrayForm one = sets_.array(word);
  const ArrayForm other = sets_.array(last);
  return one.size() == other.size() && std::equal(one.begin(), one.end(), other.begin());
}

bool PrefixWalk::keep(SeatBits& held, std::int32_t depth) {
  return keep_chunks(
      [&](unsigned number) {
        held.open(number);
        return held.chunk(number);
      },
      depth);
}

void PrefixWalk::finish(std::int32_t depth) { keep_listed(nullptr, 0, depth); }

template <class ChunkOf>
bool PrefixWalk::keep_chunks(ChunkOf chunk_of, std::int32_t depth) {
  for (std::uint64_t left = alive_.summary; left != 0; left &= left - 1) {
    const auto number = static_cast<unsigned>(std::countr_zero(left));
    const std::uint64_t* held = chunk_of(number);
    std::uint64_t* alive = alive_.chunk(number);
    for (unsigned half = 0; half < SeatBits::kWords; ++half) {
      const std::uint64_t fallen = alive[half] & ~held[half];
      if (fallen == 0) continue;
      alive[half] &= held[half];
      const unsigned first = number * BitmapForm::kChunkBits + 64 * half;
      for (std::uint64_t bits = fallen; bits != 0; bits &= bits - 1) {
        const unsigned seat = first + static_cast<unsigned>(std::countr_zero(bits));
        std::int32_t& hit = hits_[seats_.worker_on(seat)];
        hit = std::max(hit, depth);
        --count_;
      }
    }
    if ((alive[0] | alive[1]) == 0) alive_.summary &= ~(std::uint64_t{1} << number);
  }
  return count_ != 0;
}

bool PrefixWalk::keep_listed(const std::uint16_t* kept, std::size_t size, std::int32_t depth) {
  SeatBits stay;
  for (std::size_t i = 0; i < size; ++i) stay.add(kept[i]);
  return keep(stay, depth);
}

}  // namespace kv
