#include "index/index_dump.h"

#include <bit>
#include <cstring>
#include <stdexcept>

#include "base/chain.h"

namespace kv {
namespace {

static_assert(std::endian::native == std::endian::little, "dumps are little-endian");

constexpr char kMagic[4] = {'K', 'V', 'P', 'I'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kSumBytes = 8;
constexpr std::size_t kHeaderBytes = 8 + 8 * (4 + kTiers);
constexpr std::size_t kLeastEntryBytes = 12;
constexpr unsigned kHoldersMask = 0x1FFF;
constexpr unsigned kWarmthShift = 14;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("not a dump of a prefix index: " + what);
}

std::uint64_t sum(const void* bytes, std::size_t size) {
  return hash_bytes(static_cast<const std::uint8_t*>(bytes), size);
}

}  // namespace

DumpWriter::DumpWriter(const DumpHeader& header, std::size_t holders) {
  std::size_t entries = 0;
  for (const std::uint64_t of_tier : header.entries) entries += of_tier;
  bytes_.reserve(kHeaderBytes + 10 * entries + 2 * holders + kSumBytes);
  bytes_.append(kMagic, sizeof kMagic);
  put(kVersion);
  put(header.workers);
  put(header.max_entries);
  put(header.max_bytes);
  put(header.evicted);
  for (std::size_t tier = 0; tier < kTiers; ++tier) put(std::uint64_t{0});
}

void DumpWriter::entry(std::size_t tier, const DumpEntry& entry) {
  ++entries_[tier];
  put(entry.hash);
  put(static_cast<std::uint16_t>(entry.holders.size() | (entry.warmth << kWarmthShift)));
  bytes_.append(reinterpret_cast<const char*>(entry.holders.data()), entry.holders.size_bytes());
}

std::string DumpWriter::finish() && {
  std::memcpy(bytes_.data() + kHeaderBytes - sizeof entries_, entries_.data(), sizeof entries_);
  put(sum(bytes_.data(), bytes_.size()));
  return std::move(bytes_);
}

template <class T>
void DumpWriter::put(T value) {
  bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
}

DumpReader::DumpReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {
  if (bytes.size() < kHeaderBytes + kSumBytes) {
    refuse(std::to_string(bytes.size()) + " bytes are too few");
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) refuse("it does not start with KVPI");
  end_ = bytes.size() - kSumBytes;
  at_ = sizeof kMagic;
  const auto version = take<std::uint32_t>();
  if (version != kVersion) {
    refuse("version " + std::to_string(version) + ", this program reads " +
           std::to_string(kVersion));
  }
  std::uint64_t told = 0;
  std::memcpy(&told, bytes.data() + end_, sizeof told);
  if (told != sum(bytes.data(), end_)) refuse("its checksum is wrong");
  header_.workers = take<std::uint64_t>();
  header_.max_entries = take<std::uint64_t>();
  header_.max_bytes = take<std::uint64_t>();
  header_.evicted = take<std::uint64_t>();
  if (header_.workers < 1 || header_.workers > kMaxWorkers) refuse("workers out of range");
  for (const std::uint64_t bound : {header_.max_entries, header_.max_bytes}) {
    if (bound < 1 || bound > INT64_MAX) refuse("a bound out of range");
  }
  std::uint64_t room = header_.max_entries;
  for (std::uint64_t& of_tier : header_.entries) {
    of_tier = take<std::uint64_t>();
    if (of_tier > room) refuse("more entries than max_entries");
    room -= of_tier;
  }
  if ((header_.max_entries - room) > left() / kLeastEntryBytes) refuse("entries are missing");
}

DumpEntry DumpReader::next() {
  if (left() < kLeastEntryBytes) refuse("entries are missing");
  DumpEntry entry{};
  entry.hash = take<std::uint64_t>();
  const auto packed = take<std::uint16_t>();
  const std::size_t holders = packed & kHoldersMask;
  entry.warmth = packed >> kWarmthShift;
  if (holders < 1 || holders > header_.workers) refuse("an entry without a fit number of holders");
  if (left() < 2 * holders) refuse("entries are missing");
  std::memcpy(holders_.data(), bytes_.data() + at_, 2 * holders);
  at_ += 2 * holders;
  for (std::size_t i = 0; i < holders; ++i) {
    if (holders_[i] >= header_.workers || (i > 0 && holders_[i] <= holders_[i - 1])) {
      refuse("an entry whose holders are not ascending workers");
    }
  }
  entry.holders = {holders_.data(), holders};
  return entry;
}

void DumpReader::expect_end() const {
  if (left() != 0) refuse(std::to_string(left()) + " bytes too many");
}

template <class T>
T DumpReader::take() {
  T value;
  std::memcpy(&value, bytes_.data() + at_, sizeof value);
  at_ += sizeof value;
  return value;
}

}  // namespace kv
