#include "mirror/mirror.h"

#include <stdexcept>
#include <string>

namespace kv {
namespace {

constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 31;  // they are numbered in 32 bits

std::size_t checked_blocks(std::int64_t max_blocks) {
  if (max_blocks < 1 || max_blocks > kMaxBlocks) {
    throw std::invalid_argument("max_blocks must be 1.." + std::to_string(kMaxBlocks) + ", got " +
                                std::to_string(max_blocks));
  }
  return static_cast<std::size_t>(max_blocks);
}

}  // namespace

Mirror::Mirror(std::int64_t workers, std::int64_t max_blocks)
    : max_blocks_(checked_blocks(max_blocks)),
      index_(workers, max_blocks),
      workers_(static_cast<std::size_t>(workers)) {}

std::size_t Mirror::resize(std::int64_t worker, std::int64_t resident, std::int64_t remembered) {
  Recency& blocks = workers_[checked(worker)];
  if (resident < 0 || remembered < resident) {
    throw std::invalid_argument("resident must be 0..remembered, got " + std::to_string(resident) +
                                " of " + std::to_string(remembered));
  }
  const std::lock_guard lock(mutex_);
  const std::size_t others = promised_ - blocks.most_remembered();
  if (static_cast<std::size_t>(remembered) > max_blocks_ - others) {
    throw std::invalid_argument("remembered must be at most " +
                                std::to_string(max_blocks_ - others) +
                                ", what other workers leave of max_blocks, got " +
                                std::to_string(remembered));
  }
  promised_ = others + static_cast<std::size_t>(remembered);
  blocks.resize(static_cast<std::size_t>(resident), static_cast<std::size_t>(remembered), left_);
  return publish(worker);
}

Mirror::Touch Mirror::touch(std::int64_t worker, Hashes chain) {
  Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  Touch touch{++stamp_, {}};
  touch.met = blocks.touch(chain, touch.stamp, fresh_, left_);
  publish(worker);
  return touch;
}

std::size_t Mirror::forget(std::int64_t worker, Hashes chain, std::uint64_t stamp) {
  Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  blocks.forget(chain, stamp, left_);
  return publish(worker);
}

std::size_t Mirror::drop_colder(std::int64_t worker, std::uint64_t stamp) {
  Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  blocks.drop_colder(stamp, left_);
  return publish(worker);
}

std::size_t Mirror::revive_warmer(std::int64_t worker, std::uint64_t stamp) {
  Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  const std::size_t before = blocks.resident();
  blocks.revive_warmer(stamp, fresh_);
  publish(worker);
  return blocks.resident() - before;
}

std::size_t Mirror::clear_worker(std::int64_t worker) {
  Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  blocks.clear();
  return index_.clear_worker(worker);
}

void Mirror::longest_prefix(Hashes chain, std::int32_t* hits) {
  const std::lock_guard lock(mutex_);
  index_.longest_prefix(chain, hits);
}

void Mirror::raise_prefix(Hashes chain, std::int32_t* hits) {
  const std::lock_guard lock(mutex_);
  index_.raise_prefix(chain, hits);
}

std::size_t Mirror::held(std::int64_t worker) const {
  const Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  return blocks.resident();
}

std::size_t Mirror::remembered(std::int64_t worker) const {
  const Recency& blocks = workers_[checked(worker)];
  const std::lock_guard lock(mutex_);
  return blocks.size();
}

std::size_t Mirror::size() const {
  const std::lock_guard lock(mutex_);
  return index_.size();
}

std::size_t Mirror::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = sizeof *this - sizeof index_ + index_.memory_bytes() +
                      (fresh_.capacity() + left_.capacity()) * sizeof(std::uint64_t);
  for (const Recency& blocks : workers_) bytes += blocks.memory_bytes();
  return bytes;
}

std::size_t Mirror::checked(std::int64_t worker) const {
  if (worker < 0 || static_cast<std::size_t>(worker) >= workers()) {
    throw std::out_of_range("worker must be 0.." + std::to_string(workers() - 1) + ", got " +
                            std::to_string(worker));
  }
  return static_cast<std::size_t>(worker);
}

// What goes is never what came in the same call. It goes first: so the index never has to evict.
std::size_t Mirror::publish(std::int64_t worker) {
  const std::size_t left = index_.remove(worker, left_);
  index_.store(worker, fresh_);
  fresh_.clear();
  left_.clear();
  return left;
}

}  // namespace kv
