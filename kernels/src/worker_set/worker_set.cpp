#include "worker_set/worker_set.h"

#include <algorithm>
#include <array>

namespace kv {

std::uint64_t WorkerSets::make(std::span<const std::uint16_t> sorted) {
  std::uint64_t word = lanes::empty(0);
  if (sorted.size() <= lanes::kMost) {
    for (unsigned lane = 0; lane < sorted.size(); ++lane) {
      word = lanes::with(word, lane, sorted[lane]);
    }
    return word;
  }
  const std::size_t as_array = SetPool::rounded(ArrayForm::units_for(sorted.size()));
  const std::size_t as_bitmap =
      SetPool::rounded(BitmapForm::units_for(BitmapForm::chunks_of(sorted)));
  if (as_bitmap <= as_array) {
    const SetPool::Ref ref = pool_.allocate(as_bitmap);
    BitmapForm(pool_.at(ref)).fill(sorted);
    return recast(word, SetForm::bitmap, ref);
  }
  const SetPool::Ref ref = pool_.allocate(as_array);
  ArrayForm(pool_.at(ref)).fill(sorted, as_array);
  return recast(word, SetForm::array, ref);
}

bool WorkerSets::insert(std::uint64_t& word, unsigned seat) {
  if (form_of(word) == SetForm::array) return insert_in_array(word, seat);
  if (form_of(word) == SetForm::bitmap) return insert_in_bitmap(word, seat);
  if (lanes::find(word, seat) < lanes::kMost) return false;
  const unsigned count = lanes::count(word);
  if (count < lanes::kMost) {
    word = lanes::with(word, count, seat);
    return true;
  }
  std::array<std::uint16_t, lanes::kMost + 1> seats;
  for (unsigned lane = 0; lane < lanes::kMost; ++lane) {
    seats[lane] = static_cast<std::uint16_t>(lanes::seat(word, lane));
  }
  seats[lanes::kMost] = static_cast<std::uint16_t>(seat);
  std::sort(seats.begin(), seats.end());
  remake(word, seats);
  return true;
}

bool WorkerSets::erase(std::uint64_t& word, unsigned seat) {
  if (form_of(word) == SetForm::array) return erase_in_array(word, seat);
  if (form_of(word) == SetForm::bitmap) return erase_in_bitmap(word, seat);
  const unsigned lane = lanes::find(word, seat);
  if (lane == lanes::kMost) return false;
  word = lanes::without(word, lane);
  return true;
}

void WorkerSets::drop(std::uint64_t& word) {
  if (form_of(word) == SetForm::array) {
    pool_.release(word & kContent, array(word).units());
  } else if (form_of(word) == SetForm::bitmap) {
    pool_.release(word & kContent, bitmap(word).units());
  }
  word = lanes::empty(word);
}

bool WorkerSets::contains(std::uint64_t word, unsigned seat) const {
  switch (form_of(word)) {
    case SetForm::none: return false;
    case SetForm::lanes: return lanes::find(word, seat) < lanes::kMost;
    case SetForm::array: return array(word).contains(seat);
    case SetForm::bitmap: return bitmap(word).contains(seat);
  }
  return false;
}

bool WorkerSets::insert_in_array(std::uint64_t& word, unsigned seat) {
  ArrayForm form = array(word);
  Lane16* place = form.place(seat);
  if (place != form.end() && *place == seat) return false;
  if (!form.full()) {
    form.insert(place, seat);
    return true;
  }
  std::array<std::uint16_t, kMostInArray> seats;
  std::uint16_t* to = std::copy(form.begin(), place, seats.data());
  *to++ = static_cast<std::uint16_t>(seat);
  to = std::copy(place, form.end(), to);
  remake(word, {seats.data(), to});
  return true;
}

bool WorkerSets::insert_in_bitmap(std::uint64_t& word, unsigned seat) {
  BitmapForm form = bitmap(word);
  if (form.contains(seat)) return false;
  if (!form.has_chunk(seat)) {
    resize_bitmap(word, form.units(), form.units() + BitmapForm::kChunkWords);
    form = bitmap(word);
    form.add_chunk(seat);
  }
  form.word(seat) |= std::uint64_t{1} << (seat % 64);
  return true;
}

bool WorkerSets::erase_in_array(std::uint64_t& word, unsigned seat) {
  ArrayForm form = array(word);
  Lane16* place = form.place(seat);
  if (place == form.end() || *place != seat) return false;
  form.erase(place);
  const bool too_roomy =
      SetPool::rounded(ArrayForm::units_for(form.size())) + kSlackUnits <= form.units();
  if (form.size() <= kBackToLanes || too_roomy) {
    std::array<std::uint16_t, kMostInArray> seats;
    remake(word, {seats.data(), seats_of(word, seats)});
  }
  return true;
}

bool WorkerSets::erase_in_bitmap(std::uint64_t& word, unsigned seat) {
  BitmapForm form = bitmap(word);
  if (!form.contains(seat)) return false;
  form.word(seat) &= ~(std::uint64_t{1} << (seat % 64));
  if (form.chunk_is_empty(seat)) {
    const std::size_t before = form.units();
    form.drop_chunk(seat);
    resize_bitmap(word, before, form.units());
    form = bitmap(word);
  }
  const std::size_t size = form.size();
  const std::size_t as_array = SetPool::rounded(ArrayForm::units_for(size));
  if (size <= kBackToLanes || as_array + kSlackUnits <= SetPool::rounded(form.units())) {
    std::array<std::uint16_t, kMostInArray> seats;
    remake(word, {seats.data(), seats_of(word, seats)});
  }
  return true;
}

void WorkerSets::remake(std::uint64_t& word, std::span<const std::uint16_t> sorted) {
  drop(word);
  word = make(sorted) | (word & kWarmth);
}

std::size_t WorkerSets::seats_of(std::uint64_t word, std::span<std::uint16_t> into) const {
  std::size_t size = 0;
  each(word, [&](unsigned seat) { into[size++] = static_cast<std::uint16_t>(seat); });
  return size;
}

// Moves the bitmap to a piece that fits, if the sizes differ. What is copied is what both hold.
void WorkerSets::resize_bitmap(std::uint64_t& word, std::size_t before_units, std::size_t units) {
  if (SetPool::rounded(before_units) == SetPool::rounded(units)) return;
  const SetPool::Ref ref = pool_.allocate(units);
  std::copy_n(pool_.at(word & kContent), std::min(before_units, units), pool_.at(ref));
  pool_.release(word & kContent, before_units);
  word = recast(word, SetForm::bitmap, ref);
}

}  // namespace kv
