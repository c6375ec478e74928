// What a stored event's blocks are hashed with besides their tokens: images, digests, a salt.
#include <cstdint>

#include "base/chain_media.h"
#include "events/event_batch_reader.h"

namespace kv {

using msgpack::Header;
using msgpack::Kind;

void EventReader::extra_keys(Event& event) {
  const auto header = field(kExtraKeys);
  if (!header) return;
  if (header->kind != Kind::array) throw Unusable{Skip::extra_keys};
  const bool may_salt = !event.has_parent && !event.has_salt;
  std::optional<std::string> lora;
  if (event.has_lora) lora = batch_.lora(event);
  event.extras_at = static_cast<std::uint32_t>(batch_.extras_.size());
  batch_.extras_.resize(batch_.extras_.size() + event.names);
  for (std::size_t block = 0; block < header->size; ++block) {
    Entry read = entry(lora);
    if (block == 0 && may_salt && read.bare) {
      const std::string salt(batch_.text({read.bare->at, read.bare->size - kMediumOffsetBytes}));
      batch_.text_.erase(read.bare->at, read.bare->size);
      read.extra.size -= read.bare->size;
      event.has_salt = true;
      event.salt = keep(salt);
    }
    if (block < event.names) batch_.extras_[event.extras_at + block] = read.extra;
    event.has_extras |= block < event.names && read.extra.size > 0;
  }
  if (!event.has_extras) batch_.extras_.resize(event.extras_at);
}

EventReader::Entry EventReader::entry(std::optional<std::string_view> lora) {
  Entry entry;
  entry.extra.at = static_cast<std::uint32_t>(batch_.text_.size());
  const Header outer = reader_.header();
  if (outer.kind == Kind::nil) return entry;
  if (outer.kind != Kind::array) throw Unusable{Skip::extra_keys};
  for (std::size_t i = 0; i < outer.size; ++i) {
    const Header item = reader_.header();
    if (item.kind == Kind::text) {
      const std::string_view bare = utf8(item.size, Skip::extra_keys);
      if (lora && bare == *lora) {
        lora.reset();
        continue;
      }
      entry.bare = {static_cast<std::uint32_t>(batch_.text_.size()),
                    static_cast<std::uint32_t>(bare.size() + kMediumOffsetBytes)};
      add_part(bare, 0);
    } else {
      identified(item);
    }
  }
  entry.extra.size = static_cast<std::uint32_t>(batch_.text_.size()) - entry.extra.at;
  return entry;
}

void EventReader::identified(const Header& item) {
  if (item.kind == Kind::binary) return add_part(reader_.take_text(item.size), 0);
  if (item.kind != Kind::array || item.size < 1 || item.size > 2) {
    throw Unusable{Skip::extra_keys};
  }
  const Header identifier = reader_.header();
  if (identifier.kind != Kind::text && identifier.kind != Kind::binary) {
    throw Unusable{Skip::extra_keys};
  }
  const std::string_view part = reader_.take_text(identifier.size);
  add_part(part, item.size == 2 ? offset_of(reader_.header()) : 0);
}

std::uint32_t EventReader::offset_of(const Header& header) {
  const auto value = static_cast<std::int64_t>(header.value);
  if (header.kind != Kind::integer || header.negative != (value < 0) ||
      value < INT32_MIN || value > INT32_MAX) {
    throw Unusable{Skip::extra_keys};
  }
  return static_cast<std::uint32_t>(value);
}

void EventReader::add_part(std::string_view part, std::uint32_t offset) {
  extra_bytes_ += part.size() + kMediumOffsetBytes;
  if (extra_bytes_ > EventBatch::kMaxExtraBytes) throw Unusable{Skip::limit};
  append_medium(part, offset, batch_.text_);
}

}  // namespace kv
