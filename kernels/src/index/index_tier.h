// The blocks of one tier: a table in segments, which grow one at a time, and how many of the
// entries name each seat. Not thread-safe but for `find`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/block_table.h"

namespace kv {

class IndexTier {
 public:
  // `seats`: how many there are. `max_entries`: of the whole index.
  IndexTier(std::size_t seats, std::size_t max_entries);

  KV_PREFETCHES void prefetch(std::uint64_t hash) const {
    const std::uint64_t mixed = mix(hash);
    segment(mixed).prefetch(mixed);
  }

  // The entry, or nullptr.
  Record* find(std::uint64_t hash) const {
    const std::uint64_t mixed = mix(hash);
    return segment(mixed).find(hash, mixed);
  }

  // The segment an entry is or would be in.
  BlockTable& home_of(std::uint64_t hash) { return segments_[number(mix(hash))]; }

  // How many more bytes the segment asks for before it takes one more entry.
  std::size_t growth_bytes(const BlockTable& segment) const;
  void grow(BlockTable& segment);

  // Room for so many entries at once.
  void reserve(std::size_t entries);

  // Adds an entry that is absent; its segment must have room. Returns where it is.
  Record& add(const Record& record) {
    const std::uint64_t mixed = mix(record.hash);
    BlockTable& segment = segments_[number(mixed)];
    const std::size_t slot = segment.locate(record.hash, mixed).slot;
    segment.occupy(slot, record);
    ++size_;
    return segment.at(slot);
  }
  void erase(const Record& record);  // another entry may be there then

  // The next segment, round robin, that has an entry to lose. Precondition: size() > 0.
  BlockTable& next_to_evict();

  BlockTable& segment_at(std::size_t number) { return segments_[number]; }
  const std::vector<BlockTable>& segments() const { return segments_; }

  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const {
    return table_bytes_ + held.capacity() * sizeof held[0] +
           segments_.capacity() * sizeof(BlockTable);
  }

  std::vector<std::uint64_t> held;  // entries that name the seat
  std::size_t live_held = 0;        // the sum of it over seats in use

 private:
  std::size_t number(std::uint64_t mixed) const {
    return static_cast<std::size_t>(mixed >> 32 >> (32 - bits_));
  }
  const BlockTable& segment(std::uint64_t mixed) const { return segments_[number(mixed)]; }

  unsigned bits_;                  // of a mixed hash that number its segment
  std::size_t most_in_segment_;    // entries, barring a crowd of unlikely hashes
  std::vector<BlockTable> segments_;
  std::size_t size_ = 0;
  std::size_t table_bytes_ = 0;
  std::size_t hand_ = 0;
};

}  // namespace kv
