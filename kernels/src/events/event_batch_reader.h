// Reads events of a batch, field after field. Lifetime: the reading of one batch.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "base/msgpack.h"
#include "events/event_batch.h"

namespace kv {

// This event cannot be used; those around it can.
struct Unusable {
  Skip why;
};

class EventReader {
 public:
  EventReader(EventBatch& batch, msgpack::Reader& reader) : batch_(batch), reader_(reader) {}

  // Reads the event here into the batch, or counts why it is skipped. Throws msgpack::Malformed
  // where its end cannot be found.
  void read();

 private:
  // In the array form's order; those that mean nothing to us are left out.
  enum Field {
    kHashes, kParent, kTokens, kBlockSize, kLoraId, kMedium, kLoraName, kExtraKeys, kGroup, kKind,
    kWindow, kLocality, kSalt, kMmKeys, kType, kFields
  };
  enum class Tag { stored, removed, cleared, unknown };

  struct Entry {
    Piece extra;
    std::optional<Piece> bare;  // the last bare string, its offset included
  };

  static Tag tag_of(std::string_view tag);
  static std::optional<Field> field_of(std::string_view key);
  static std::optional<Field> field_at(Tag tag, std::size_t position);

  Tag open();
  Tag open_map(std::size_t pairs);
  std::optional<Field> read_key(std::size_t guess);
  void skip_field(std::optional<Field> field);
  Tag read_tag();
  void use(Tag tag, Event& event);
  void stored(Event& event);
  void removed(Event& event);

  std::optional<msgpack::Header> field(Field field) {
    if (at_[field] == nullptr) return std::nullopt;
    reader_.go(at_[field]);
    if (reader_.at_nil()) return std::nullopt;
    return reader_.header();
  }
  std::uint64_t hash(const msgpack::Header& header);
  void hashes(Event& event);
  void parent(Event& event);
  void tokens(Event& event);
  void wide_tokens(Event& event);
  std::optional<std::uint32_t> small(Field field, std::uint32_t most, Skip otherwise);
  void group(Event& event);
  void cache(Event& event);
  bool may_mask();
  bool is_never_removed(const Event& event);
  std::string lora_id();
  std::optional<std::string_view> text(Field field, Skip otherwise);
  std::string_view utf8(std::size_t size, Skip otherwise);
  void tier(Event& event);
  [[noreturn]] void unknown_medium(std::string_view medium, std::string_view locality);
  void extra_keys(Event& event);
  Entry entry(std::optional<std::string_view> lora);
  void identified(const msgpack::Header& item);
  static std::uint32_t offset_of(const msgpack::Header& header);
  void mm_keys(Event& event);
  void images();
  void image(std::size_t pairs);
  Piece keep(std::string_view text);
  void add_part(std::string_view part, std::uint32_t offset);

  EventBatch& batch_;
  msgpack::Reader& reader_;
  std::array<const std::uint8_t*, kFields> at_{};  // where each field of the event begins
  const std::uint8_t* taken_ = nullptr;            // where tokens began that were read already
  std::size_t taken_tokens_ = 0;
  const std::uint8_t* words_ = nullptr;            // where hashes begin that all are 64-bit ints
  std::size_t extra_bytes_ = 0;                    // of the events that are used
};

}  // namespace kv
