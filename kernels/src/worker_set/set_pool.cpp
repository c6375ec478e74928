#include "worker_set/set_pool.h"

#include <utility>

namespace kv {

SetPool::Ref SetPool::allocate(std::size_t units) {
  const std::size_t size = rounded(units);
  std::uint32_t number = partial_[size];
  if (number == kNoSlab) number = open_slab(size);
  Slab& slab = slabs_[number];
  std::size_t piece = slab.freed;
  if (piece != kNoPiece) {
    slab.freed = static_cast<std::uint16_t>(slab.words[piece * size]);
  } else {
    piece = slab.fresh++;
  }
  ++slab.used;
  used_units_ += size;
  if (slab.full()) unlink(number);
  return Ref{number} * kSlabUnits + piece * size;
}

void SetPool::release(Ref ref, std::size_t units) {
  const std::size_t size = rounded(units);
  const auto number = static_cast<std::uint32_t>(ref / kSlabUnits);
  const std::size_t offset = ref % kSlabUnits;
  Slab& slab = slabs_[number];
  if (slab.full()) link(number);
  used_units_ -= size;
  slab.words[offset] = slab.freed;
  slab.freed = static_cast<std::uint16_t>(offset / size);
  if (--slab.used == 0) close_slab(number);
}

std::size_t SetPool::memory_bytes() const {
  const std::size_t open = slabs_.size() - closed_.size() + (spare_ ? 1 : 0);
  return open * kSlabUnits * sizeof(std::uint64_t) + slabs_.capacity() * sizeof(Slab) +
         bases_.capacity() * sizeof bases_[0] + closed_.capacity() * sizeof closed_[0];
}

std::uint32_t SetPool::open_slab(std::size_t units) {
  std::uint32_t number = 0;
  if (closed_.empty()) {
    number = static_cast<std::uint32_t>(slabs_.size());
    slabs_.emplace_back();
    bases_.push_back(nullptr);
  } else {
    number = closed_.back();
    closed_.pop_back();
  }
  Slab& slab = slabs_[number];
  slab = Slab{};
  slab.words = spare_ ? std::move(spare_)
                      : std::make_unique_for_overwrite<std::uint64_t[]>(kSlabUnits);
  slab.units = static_cast<std::uint16_t>(units);
  bases_[number] = slab.words.get();
  link(number);
  return number;
}

void SetPool::close_slab(std::uint32_t number) {
  unlink(number);
  spare_ = std::move(slabs_[number].words);
  bases_[number] = nullptr;
  closed_.push_back(number);
}

void SetPool::link(std::uint32_t number) {
  Slab& slab = slabs_[number];
  std::uint32_t& head = partial_[slab.units];
  slab.before = kNoSlab;
  slab.after = head;
  if (head != kNoSlab) slabs_[head].before = number;
  head = number;
}

void SetPool::unlink(std::uint32_t number) {
  const Slab& slab = slabs_[number];
  if (slab.before != kNoSlab) {
    slabs_[slab.before].after = slab.after;
  } else {
    partial_[slab.units] = slab.after;
  }
  if (slab.after != kNoSlab) slabs_[slab.after].before = slab.before;
}

}  // namespace kv
