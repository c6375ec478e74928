#include "events/event_batch_reader.h"

#include <algorithm>
#include <limits>

namespace kv {

using msgpack::Header;
using msgpack::Kind;
using msgpack::Malformed;

void EventReader::read() {
  const auto names = batch_.names_.size();
  const auto tokens = batch_.tokens_.size();
  const auto extras = batch_.extras_.size();
  const auto text = batch_.text_.size();
  const Tag tag = open();
  const std::uint8_t* end = reader_.at();
  Event event;
  Use use = Use::yes;
  if (tag == Tag::stored) {
    use = stored(event);
  } else if (tag == Tag::removed) {
    use = removed(event);
  } else if (tag == Tag::unknown) {
    use = Use::no;
  }
  reader_.go(end);
  if (use == Use::yes) {
    if (tag == Tag::stored) {
      batch_.blocks_ += event.names;
    } else {
      batch_.tokens_.resize(tokens);  // whatever it had there, it has none
    }
    batch_.events_.push_back(event);
    return;
  }
  ++batch_.skipped_;
  batch_.names_.resize(names);
  batch_.tokens_.resize(tokens);
  batch_.extras_.resize(extras);
  batch_.text_.resize(text);
}

EventReader::Use EventReader::removed(Event& event) {
  event.kind = Event::Kind::removed;
  hashes(event);
  const Use use = tier(event);
  if (const auto group = small(kGroup, 0, EventBatch::kMaxRank)) {
    event.group = static_cast<std::int32_t>(*group);
  }
  return use;
}

EventReader::Use EventReader::stored(Event& event) {
  event.kind = Event::Kind::stored;
  hashes(event);
  parent(event);
  Use use = tokens(event);
  event.block_size = small(kBlockSize, 1, EventBatch::kMaxBlockSize).value_or(1);
  const std::string numbered = lora_id();
  if (tier(event) == Use::no) use = Use::no;
  std::optional<std::string_view> lora = text(kLoraName);
  const std::optional<std::string_view> salt = text(kSalt);
  if (const auto group = small(kGroup, 0, EventBatch::kMaxRank)) {
    event.group = static_cast<std::int32_t>(*group);
  }
  const std::string_view kind = text(kKind).value_or("");
  event.full_attention =
      kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention";
  if (!lora && !numbered.empty()) lora = numbered;
  event.has_lora = lora.has_value();
  event.has_salt = salt.has_value();
  if (lora) event.lora = keep(*lora);
  if (salt) event.salt = keep(*salt);
  if (extra_keys(event) == Use::no) use = Use::no;
  if (mm_keys(event) == Use::no) use = Use::no;
  const std::uint64_t wanted = std::uint64_t{event.names} * event.block_size;
  return event.tokens != 0 && event.tokens != wanted ? Use::no : use;
}

void EventReader::hashes(Event& event) {
  const auto header = field(kHashes);
  if (!header || header->kind != Kind::array) {
    throw Malformed("block_hashes must be an array of hashes");
  }
  blocks_ += header->size;
  if (blocks_ > EventBatch::kMaxBlocks) {
    throw Malformed("block_hashes: more than " + std::to_string(EventBatch::kMaxBlocks) +
                    " blocks in one batch");
  }
  event.names_at = static_cast<std::uint32_t>(batch_.names_.size());
  event.names = static_cast<std::uint32_t>(header->size);
  if (words_ == at_[kHashes]) {
    batch_.names_.resize(batch_.names_.size() + header->size);
    reader_.take_words(header->size, batch_.names_.data() + event.names_at);
    return;
  }
  for (std::size_t i = 0; i < header->size; ++i) {
    batch_.names_.push_back(hash(reader_.header(), kHashes));
  }
}

void EventReader::parent(Event& event) {
  const auto header = field(kParent);
  event.has_parent = header.has_value();
  if (header) event.parent = hash(*header, kParent);
}

// A digest is shortened as vLLM itself does: its last 8 bytes, big-endian.
std::uint64_t EventReader::hash(const Header& header, Field field) {
  if (header.kind == Kind::integer) return header.value;
  if (header.kind != Kind::binary || header.size < 1 || header.size > EventBatch::kMaxHashBytes) {
    throw Malformed(std::string(name_of(field)) + ": a hash must be an int or 1.." +
                    std::to_string(EventBatch::kMaxHashBytes) + " bytes");
  }
  const std::uint8_t* bytes = reader_.take(header.size);
  std::uint64_t name = 0;
  for (std::size_t i = 0; i < header.size; ++i) name = name << 8 | bytes[i];
  return name;
}

EventReader::Use EventReader::tokens(Event& event) {
  const auto header = field(kTokens);
  if (!header) return Use::yes;
  if (header->kind != Kind::array) throw Malformed("token_ids must be an array of ints");
  const std::size_t count = header->size;
  tokens_ += count;
  if (tokens_ > EventBatch::kMaxTokens) {
    throw Malformed("token_ids: more than " + std::to_string(EventBatch::kMaxTokens) +
                    " tokens in one batch");
  }
  event.tokens = static_cast<std::uint32_t>(count);
  if (taken_ == at_[kTokens]) {
    event.tokens_at = static_cast<std::uint32_t>(batch_.tokens_.size() - count);
    return Use::yes;
  }
  event.tokens_at = static_cast<std::uint32_t>(batch_.tokens_.size());
  batch_.tokens_.resize(batch_.tokens_.size() + count);
  std::int32_t* token = batch_.tokens_.data() + event.tokens_at;
  constexpr std::uint64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* start = reader_.at();
    const Header next = reader_.header();
    if (!next.within(0, kMost)) {
      reader_.go(start);
      return odd_tokens(count - i);
    }
    token[i] = static_cast<std::int32_t>(next.value);
  }
  return Use::yes;
}

// Pairs (bigrams) and strings (images) are known not to be tokens; all else is wrong.
EventReader::Use EventReader::odd_tokens(std::size_t count) {
  for (; count > 0; --count) {
    const std::uint8_t* start = reader_.at();
    const Kind kind = reader_.header().kind;
    if (kind == Kind::array || kind == Kind::text) return Use::no;
    reader_.go(start);
    reader_.skip();
  }
  throw Malformed("token_ids: a token must be an int in 0..2147483647");
}

std::optional<std::uint32_t> EventReader::small(Field field, std::uint32_t least,
                                                std::uint32_t most) {
  const auto header = this->field(field);
  if (!header) return std::nullopt;
  if (!header->within(least, most)) {
    throw Malformed(std::string(name_of(field)) + " must be " + std::to_string(least) + ".." +
                    std::to_string(most) + " or nil");
  }
  return static_cast<std::uint32_t>(header->value);
}

// vLLM until 0.13 gives adapters no name; they are not the base model all the same.
std::string EventReader::lora_id() {
  const auto header = field(kLoraId);
  if (!header) return "";
  if (header->kind != Kind::integer) throw Malformed("lora_id must be an int or nil");
  if (header->value == 0) return "";
  return "lora_id:" + (header->negative ? std::to_string(static_cast<std::int64_t>(header->value))
                                        : std::to_string(header->value));
}

std::optional<std::string_view> EventReader::text(Field field) {
  const auto header = this->field(field);
  if (!header) return std::nullopt;
  if (header->kind != Kind::text) {
    throw Malformed(std::string(name_of(field)) + " must be a string or nil");
  }
  return utf8(header->size, field);
}

std::string_view EventReader::utf8(std::size_t size, Field field) {
  const std::string_view text = reader_.take_text(size);
  if (!msgpack::is_utf8(text)) throw Malformed(std::string(name_of(field)) + " must be UTF-8");
  return text;
}

EventReader::Use EventReader::tier(Event& event) {
  const std::string_view medium = text(kMedium).value_or("GPU");
  if (medium == "GPU") {
    event.tier = 0;
  } else if (medium == "CPU" || medium == "CPU_PINNED") {
    event.tier = 1;
  } else if (medium == "DISK" || medium == "STORAGE" || medium == "EXTERNAL") {
    event.tier = 2;
  } else {
    return Use::no;
  }
  return Use::yes;
}

Piece EventReader::keep(std::string_view text) {
  const Piece piece{static_cast<std::uint32_t>(batch_.text_.size()),
                    static_cast<std::uint32_t>(text.size())};
  batch_.text_ += text;
  return piece;
}

}  // namespace kv
