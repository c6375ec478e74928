// The prefix index as bytes, for a router that restarts. Version 1, all numbers little-endian:
//   "KVPI", u32 version, u64 workers, u64 max_entries, u64 max_bytes, u64 evicted,
//   u64 entries of tier 0, 1, 2; then the entries, tier by tier:
//   u64 hash, u16 holders (bits 0..12) and warmth (bits 14..15), u16 for each holder, ascending;
//   last, the XXH3-64 of everything before.
// tests/oracles/index.py does the same in Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kv {

constexpr int kTiers = 3;                 // gpu, host, disk
constexpr std::int64_t kMaxWorkers = 4096;

struct DumpHeader {
  std::uint64_t workers;
  std::uint64_t max_entries;
  std::uint64_t max_bytes;
  std::uint64_t evicted;
  std::array<std::uint64_t, kTiers> entries;
};

struct DumpEntry {
  std::uint64_t hash;
  std::uint64_t warmth;                    // 0..3
  std::span<const std::uint16_t> holders;  // ascending, at least one
};

class DumpWriter {
 public:
  // `holders`: of all entries together, so that memory is asked for once. The counts of entries
  // in `header` are an estimate, too; `finish` writes how many there were.
  DumpWriter(const DumpHeader& header, std::size_t holders);

  // Tiers ascending.
  void entry(std::size_t tier, const DumpEntry& entry);
  std::string finish() &&;

 private:
  template <class T>
  void put(T value);

  std::string bytes_;
  std::array<std::uint64_t, kTiers> entries_{};
};

class DumpReader {
 public:
  // Throws std::invalid_argument unless the frame is whole: magic, version, checksum, ranges.
  explicit DumpReader(std::span<const std::uint8_t> bytes);

  const DumpHeader& header() const { return header_; }

  // The next entry; its holders stay readable until the next call. Throws
  // std::invalid_argument for one that cannot be.
  DumpEntry next();

  // Throws std::invalid_argument unless everything was read.
  void expect_end() const;

 private:
  template <class T>
  T take();
  std::size_t left() const { return end_ - at_; }

  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
  std::size_t end_ = 0;
  DumpHeader header_{};
  std::array<std::uint16_t, kMaxWorkers> holders_;
};

}  // namespace kv
