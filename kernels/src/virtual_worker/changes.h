// What happened to the visible contents of a cache, in order. The tail since the last `tell` is
// not for outsiders yet: it leaves with the end of the step that caused it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kv::engine {

// Those of the host are not in a row: their parents are not told. After them follow the two kinds
// of each group of windows or states, in their order.
enum class ChangeKind : std::uint8_t {
  stored = 0, removed = 1, cleared = 2, stored_host = 3, removed_host = 4
};

// `kind`, stored or removed, of a group: 0 is full attention, the others are counted from 1.
inline ChangeKind of_group(ChangeKind kind, std::size_t group) {
  const std::size_t first = group == 0 ? 0 : 3 + 2 * group;
  return static_cast<ChangeKind>(first + static_cast<std::size_t>(kind));
}

struct Change {
  ChangeKind kind;
  bool has_parent;
  std::uint64_t parent;  // chain hash before the first one
  std::size_t hashes;
};

class ChangeLog {
 public:
  explicit ChangeLog(bool on) : on_(on) {}

  bool on() const { return on_; }
  bool has_untold() const { return told_changes_ < changes_.size(); }
  bool has_told() const { return told_changes_ != 0; }

  void stored(const std::uint64_t* parent, std::span<const std::uint64_t> hashes,
              std::size_t group = 0) {
    if (!on_) return;
    const std::uint64_t before = parent != nullptr ? *parent : 0;
    changes_.push_back(
        {of_group(ChangeKind::stored, group), parent != nullptr, before, hashes.size()});
    hashes_.insert(hashes_.end(), hashes.begin(), hashes.end());
  }

  // To be followed by `count` calls of `hash`.
  void removed(std::size_t count, std::size_t group = 0) {
    if (on_) changes_.push_back({of_group(ChangeKind::removed, group), false, 0, count});
  }
  void hash(std::uint64_t hash) {
    if (on_) hashes_.push_back(hash);
  }

  // One of the host's kinds; nothing where there are no hashes.
  void host(ChangeKind kind, std::span<const std::uint64_t> hashes) {
    if (!on_ || hashes.empty()) return;
    changes_.push_back({kind, false, 0, hashes.size()});
    hashes_.insert(hashes_.end(), hashes.begin(), hashes.end());
  }

  void cleared() {
    if (on_) changes_.push_back({ChangeKind::cleared, false, 0, 0});
  }

  void tell() {
    told_changes_ = changes_.size();
    told_hashes_ = hashes_.size();
  }

  void drop_untold() {
    changes_.resize(told_changes_);
    hashes_.resize(told_hashes_);
  }

  // Gives (change, its hashes) for all that was told, and forgets it.
  template <class Take>
  void take(Take take) {
    const std::uint64_t* at = hashes_.data();
    for (std::size_t i = 0; i < told_changes_; ++i) {
      take(changes_[i], std::span(at, changes_[i].hashes));
      at += changes_[i].hashes;
    }
    using Offset = std::ptrdiff_t;
    changes_.erase(changes_.begin(), changes_.begin() + static_cast<Offset>(told_changes_));
    hashes_.erase(hashes_.begin(), hashes_.begin() + static_cast<Offset>(told_hashes_));
    told_changes_ = told_hashes_ = 0;
  }

 private:
  bool on_;
  std::vector<Change> changes_;
  std::vector<std::uint64_t> hashes_;
  std::size_t told_changes_ = 0;
  std::size_t told_hashes_ = 0;
};

}  // namespace kv::engine
