// Images of a stored event's blocks as TensorRT-LLM's push tells them: `mm_keys`, one list a block
// of maps with `hash` and `start_offset`. They are hashed behind those of `extra_keys`, and alike.
#include <cstdint>

#include "events/event_batch_reader.h"

namespace kv {

using msgpack::Header;
using msgpack::Kind;

void EventReader::mm_keys(Event& event) {
  const auto header = field(kMmKeys);
  if (!header) return;
  if (header->kind != Kind::array) throw Unusable{Skip::extra_keys};
  if (!event.has_extras) {
    event.extras_at = static_cast<std::uint32_t>(batch_.extras_.size());
    batch_.extras_.resize(batch_.extras_.size() + event.names);
  }
  for (std::size_t block = 0; block < header->size; ++block) {
    const bool ours = block < event.names;
    Piece extra{static_cast<std::uint32_t>(batch_.text_.size()), 0};
    if (ours) batch_.text_ += std::string(batch_.text(batch_.extras_[event.extras_at + block]));
    images();
    if (!ours) continue;
    extra.size = static_cast<std::uint32_t>(batch_.text_.size()) - extra.at;
    batch_.extras_[event.extras_at + block] = extra;
    event.has_extras |= extra.size > 0;
  }
  if (!event.has_extras) batch_.extras_.resize(event.extras_at);
}

// Those of one block.
void EventReader::images() {
  const Header outer = reader_.header();
  if (outer.kind == Kind::nil) return;
  if (outer.kind != Kind::array) throw Unusable{Skip::extra_keys};
  for (std::size_t i = 0; i < outer.size; ++i) {
    const Header item = reader_.header();
    if (item.kind != Kind::map) throw Unusable{Skip::extra_keys};
    image(item.size);
  }
}

void EventReader::image(std::size_t pairs) {
  std::optional<std::string_view> hash;
  std::uint32_t offset = 0;
  for (; pairs > 0; --pairs) {
    std::string_view key;
    const std::uint8_t* start = reader_.at();
    const Header name = reader_.header();
    if (name.kind == Kind::text) {
      key = reader_.take_text(name.size);
    } else {
      reader_.go(start);
      reader_.skip();
    }
    start = reader_.at();
    const Header value = reader_.header();
    if (key == "hash" && (value.kind == Kind::text || value.kind == Kind::binary)) {
      hash = reader_.take_text(value.size);
      continue;
    }
    if (key == "start_offset") {
      offset = offset_of(value);
      continue;
    }
    reader_.go(start);
    reader_.skip();
  }
  if (!hash) throw Unusable{Skip::extra_keys};
  add_part(*hash, offset);
}

}  // namespace kv
