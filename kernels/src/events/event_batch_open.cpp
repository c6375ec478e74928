// Finds an event's fields, in its array form or its map form.
#include <cstring>
#include <utility>

#include "events/event_batch_reader.h"

namespace kv {

using msgpack::Header;
using msgpack::Kind;

namespace {

// The wire's names of the fields that mean something to us, in the enumeration's order.
constexpr std::array<std::string_view, 15> kKeys = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
    "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window", "locality", "cache_salt", "mm_keys", "type"};

// A key as it is packed mostly, in words to compare at once.
struct PackedKey {
  static constexpr std::size_t kWords = 4;

  std::size_t size = 0;
  std::array<std::uint64_t, kWords> words{};
  std::array<std::uint64_t, kWords> masks{};  // bytes that count

  constexpr explicit PackedKey(std::string_view key) : size(1 + key.size()) {
    for (std::size_t i = 0; i < size; ++i) {
      const auto byte = static_cast<std::uint8_t>(i == 0 ? 0xA0 | key.size() : key[i - 1]);
      words[i / 8] |= std::uint64_t{byte} << (8 * (i % 8));
      masks[i / 8] |= std::uint64_t{0xFF} << (8 * (i % 8));
    }
  }

  // Precondition: kWords * 8 bytes are there.
  bool is_at(const std::uint8_t* bytes) const {
    std::array<std::uint64_t, kWords> there;
    std::memcpy(there.data(), bytes, sizeof there);
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < kWords; ++i) wrong |= (there[i] ^ words[i]) & masks[i];
    return wrong == 0;
  }
};

constexpr auto kPackedKeys = []<std::size_t... i>(std::index_sequence<i...>) {
  return std::array{PackedKey(kKeys[i])...};
}(std::make_index_sequence<kKeys.size()>());

}  // namespace

EventReader::Tag EventReader::tag_of(std::string_view tag) {
  if (tag == "BlockStored") return Tag::stored;
  if (tag == "BlockRemoved") return Tag::removed;
  return tag == "AllBlocksCleared" ? Tag::cleared : Tag::unknown;
}

std::optional<EventReader::Field> EventReader::field_of(std::string_view key) {
  for (std::size_t i = 0; i < kKeys.size(); ++i) {
    if (key == kKeys[i]) return static_cast<Field>(i);
  }
  return std::nullopt;
}

std::optional<EventReader::Field> EventReader::field_at(Tag tag, std::size_t position) {
  constexpr std::array removed = {kHashes, kMedium, kGroup};
  if (tag == Tag::stored && position < kLocality) return static_cast<Field>(position);
  if (tag == Tag::removed && position < removed.size()) return removed[position];
  return std::nullopt;
}

EventReader::Tag EventReader::open() {
  at_.fill(nullptr);
  taken_ = words_ = nullptr;
  const std::uint8_t* start = reader_.at();
  const Header outer = reader_.header();
  if (outer.kind == Kind::map) return open_map(outer.size);
  if (outer.kind != Kind::array || outer.size == 0) {
    reader_.go(start);
    reader_.skip();
    return Tag::unknown;
  }
  const Tag tag = read_tag();
  for (std::size_t position = 0; position + 1 < outer.size; ++position) {
    skip_field(field_at(tag, position));
  }
  return tag;
}

EventReader::Tag EventReader::open_map(std::size_t pairs) {
  std::size_t guess = kType;  // keys come in our order mostly, the type before them
  for (; pairs > 0; --pairs) {
    const std::optional<Field> field = read_key(guess);
    if (field) guess = *field + 1 < kFields ? *field + std::size_t{1} : 0;
    skip_field(field);
  }
  if (at_[kType] == nullptr) return Tag::unknown;
  const std::uint8_t* end = reader_.at();
  reader_.go(at_[kType]);
  const Tag tag = read_tag();
  reader_.go(end);
  return tag;
}

std::optional<EventReader::Field> EventReader::read_key(std::size_t guess) {
  const std::uint8_t* start = reader_.at();
  const PackedKey& likely = kPackedKeys[guess];
  if (reader_.left() >= sizeof likely.words && likely.is_at(start)) {
    reader_.go(start + likely.size);
    return static_cast<Field>(guess);
  }
  const Header key = reader_.header();
  if (key.kind == Kind::text) return field_of(reader_.take_text(key.size));
  reader_.go(start);
  reader_.skip();
  return std::nullopt;
}

// Goes past a field and remembers where it is. Tokens are read at once, where they are as usual;
// hashes, too, are not looked at one by one.
void EventReader::skip_field(std::optional<Field> field) {
  if (!field) return reader_.skip();
  const std::uint8_t* start = reader_.at();
  at_[*field] = start;
  if (*field == kTokens) {
    const Header header = reader_.header();
    const std::size_t before = batch_.tokens_.size() - (taken_ == nullptr ? 0 : taken_tokens_);
    const std::size_t all = before + batch_.wide_.size() + header.size;
    if (header.kind == Kind::array && all <= EventBatch::kMaxTokens) {
      batch_.tokens_.resize(before + header.size);
      taken_ = nullptr;
      if (reader_.take_ints(header.size, batch_.tokens_.data() + before)) {
        taken_ = start;
        taken_tokens_ = header.size;
        return;
      }
      batch_.tokens_.resize(before);
    }
    reader_.go(start);
  } else if (*field == kHashes) {
    const Header header = reader_.header();
    if (header.kind == Kind::array && reader_.skip_words(header.size)) {
      words_ = start;
      return;
    }
    reader_.go(start);
  }
  reader_.skip();
}

EventReader::Tag EventReader::read_tag() {
  const std::uint8_t* start = reader_.at();
  const Header header = reader_.header();
  if (header.kind == Kind::text) return tag_of(reader_.take_text(header.size));
  reader_.go(start);
  reader_.skip();
  return Tag::unknown;
}

}  // namespace kv
