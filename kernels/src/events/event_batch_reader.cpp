#include "events/event_batch_reader.h"

#include <algorithm>
#include <limits>

namespace kv {

using msgpack::Header;
using msgpack::Kind;

namespace {

bool is_window_or_state(std::string_view kind) {
  return kind == "sliding_window" || kind == "sliding_window_mla" || kind == "mamba";
}

constexpr std::uint8_t kFarTier = 2;  // of what is in another machine, whatever it is in there

// `lower`: ASCII, in lower case.
bool is_in_any_case(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a | 0x20 : a) == b; });
}

}  // namespace

void EventReader::read() {
  const auto names = batch_.names_.size();
  const auto tokens = batch_.tokens_.size();
  const auto wide = batch_.wide_.size();
  const auto extras = batch_.extras_.size();
  const auto text = batch_.text_.size();
  const std::size_t extra_bytes = extra_bytes_;
  const Tag tag = open();
  const std::uint8_t* end = reader_.at();
  Event event;
  try {
    use(tag, event);
    if (tag == Tag::stored) {
      batch_.blocks_ += event.names;
      batch_.has_full_ |= event.cache == CacheKind::full;
      batch_.has_windows_ |= event.cache == CacheKind::window || event.cache == CacheKind::state;
      if (event.is_wide) batch_.tokens_.resize(tokens);
    } else {
      batch_.tokens_.resize(tokens);  // whatever it had there, it has none
    }
    batch_.events_.push_back(event);
  } catch (const Unusable& unusable) {
    ++batch_.skips_[static_cast<std::size_t>(unusable.why)];
    batch_.names_.resize(names);
    batch_.tokens_.resize(tokens);
    batch_.wide_.resize(wide);
    batch_.extras_.resize(extras);
    batch_.text_.resize(text);
    extra_bytes_ = extra_bytes;
  }
  reader_.go(end);
}

// Throws Unusable.
void EventReader::use(Tag tag, Event& event) {
  if (tag == Tag::unknown) throw Unusable{Skip::type};
  if (tag == Tag::stored) stored(event);
  if (tag == Tag::removed) removed(event);
}

void EventReader::removed(Event& event) {
  event.kind = Event::Kind::removed;
  hashes(event);
  tier(event);
  group(event);
}

void EventReader::stored(Event& event) {
  event.kind = Event::Kind::stored;
  hashes(event);
  parent(event);
  tokens(event);
  event.block_size = small(kBlockSize, EventBatch::kMaxBlockSize, Skip::block_size).value_or(1);
  // Blocks that are only named have whatever size they were first told with.
  if (event.block_size == 0 && event.tokens != 0) throw Unusable{Skip::block_size};
  if (event.tokens != 0 && event.tokens != std::uint64_t{event.names} * event.block_size) {
    if (!may_mask()) throw Unusable{Skip::token_count};
    event.masked = true;
    if (event.is_wide) event.tokens = 0;
    event.is_wide = false;
  }
  const std::string numbered = lora_id();
  tier(event);
  std::optional<std::string_view> lora = text(kLoraName, Skip::field);
  const std::optional<std::string_view> salt = text(kSalt, Skip::field);
  group(event);
  cache(event);
  if (!lora && !numbered.empty()) lora = numbered;
  event.has_lora = lora.has_value();
  event.has_salt = salt.has_value();
  if (lora) event.lora = keep(*lora);
  if (salt) event.salt = keep(*salt);
  extra_keys(event);
  mm_keys(event);
  if (is_never_removed(event)) throw Unusable{Skip::never_removed};
}

void EventReader::hashes(Event& event) {
  const auto header = field(kHashes);
  if (!header || header->kind != Kind::array) throw Unusable{Skip::hashes};
  const std::size_t before = batch_.names_.size();
  if (before + header->size > EventBatch::kMaxBlocks) throw Unusable{Skip::limit};
  event.names_at = static_cast<std::uint32_t>(before);
  event.names = static_cast<std::uint32_t>(header->size);
  if (words_ == at_[kHashes]) {
    batch_.names_.resize(before + header->size);
    reader_.take_words(header->size, batch_.names_.data() + before);
    return;
  }
  for (std::size_t i = 0; i < header->size; ++i) batch_.names_.push_back(hash(reader_.header()));
}

void EventReader::parent(Event& event) {
  const auto header = field(kParent);
  event.has_parent = header.has_value();
  if (header) event.parent = hash(*header);
}

// A digest is shortened as vLLM itself does: its last 8 bytes, big-endian.
std::uint64_t EventReader::hash(const Header& header) {
  if (header.kind == Kind::integer) return header.value;
  if (header.kind != Kind::binary || header.size < 1 || header.size > EventBatch::kMaxHashBytes) {
    throw Unusable{Skip::hashes};
  }
  const std::uint8_t* bytes = reader_.take(header.size);
  std::uint64_t name = 0;
  for (std::size_t i = 0; i < header.size; ++i) name = name << 8 | bytes[i];
  return name;
}

void EventReader::tokens(Event& event) {
  const auto header = field(kTokens);
  if (!header) return;
  if (header->kind != Kind::array) throw Unusable{Skip::tokens};
  const std::size_t count = header->size;
  event.tokens = static_cast<std::uint32_t>(count);
  if (taken_ == at_[kTokens]) {
    event.tokens_at = static_cast<std::uint32_t>(batch_.tokens_.size() - count);
    return;
  }
  const std::size_t before = batch_.tokens_.size();
  if (before + batch_.wide_.size() + count > EventBatch::kMaxTokens) throw Unusable{Skip::limit};
  event.tokens_at = static_cast<std::uint32_t>(before);
  batch_.tokens_.resize(before + count);
  constexpr std::uint64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (std::size_t i = 0; i < count; ++i) {
    const Header next = reader_.header();
    if (!next.within(0, kMost)) return wide_tokens(event);
    batch_.tokens_[before + i] = static_cast<std::int32_t>(next.value);
  }
}

// Ids beyond int32 stand for images (SGLang); pairs (bigrams) and strings are no ids.
void EventReader::wide_tokens(Event& event) {
  const std::size_t count = field(kTokens)->size;
  event.is_wide = true;
  event.tokens_at = static_cast<std::uint32_t>(batch_.wide_.size());
  for (std::size_t i = 0; i < count; ++i) {
    const Header next = reader_.header();
    if (!next.within(0, std::numeric_limits<std::int64_t>::max())) throw Unusable{Skip::tokens};
    batch_.wide_.push_back(static_cast<std::int64_t>(next.value));
  }
}

std::optional<std::uint32_t> EventReader::small(Field field, std::uint32_t most, Skip otherwise) {
  const auto header = this->field(field);
  if (!header) return std::nullopt;
  if (!header->within(0, most)) throw Unusable{otherwise};
  return static_cast<std::uint32_t>(header->value);
}

void EventReader::group(Event& event) {
  if (const auto group = small(kGroup, EventBatch::kMaxRank, Skip::field)) {
    event.group = static_cast<std::int32_t>(*group);
  }
}

// Whether the event may tell tokens of more blocks than it names: such groups drop blocks early.
bool EventReader::may_mask() {
  const auto header = field(kKind);
  if (!header || header->kind != Kind::text) return false;
  return is_window_or_state(reader_.take_text(header->size));
}

// LMCache's connector in vLLM's process tells what it stores in chunks, never what it drops. No
// other writes "cpu" in lower case without a cache group.
bool EventReader::is_never_removed(const Event& event) {
  return event.tokens > 0 && event.group < 0 && text(kMedium, Skip::medium) == "cpu";
}

// Kinds as vLLM names them. A window of no tokens is none that we understand.
void EventReader::cache(Event& event) {
  const std::optional<std::string_view> kind = text(kKind, Skip::field);
  if (!kind) return;
  if (*kind == "full_attention" || *kind == "mla_attention" || *kind == "sink_full_attention") {
    event.cache = CacheKind::full;
  } else if (*kind == "mamba") {
    event.cache = CacheKind::state;
  } else if (is_window_or_state(*kind)) {
    constexpr std::uint32_t kMost = std::numeric_limits<std::int32_t>::max();
    event.window = small(kWindow, kMost, Skip::field).value_or(0);
    event.cache = event.window > 0 ? CacheKind::window : CacheKind::other;
  } else {
    event.cache = CacheKind::other;
  }
}

// vLLM until 0.13 gives adapters no name; they are not the base model all the same.
std::string EventReader::lora_id() {
  const auto header = field(kLoraId);
  if (!header) return "";
  if (header->kind != Kind::integer) throw Unusable{Skip::field};
  if (header->value == 0) return "";
  return "lora_id:" + (header->negative ? std::to_string(static_cast<std::int64_t>(header->value))
                                        : std::to_string(header->value));
}

std::optional<std::string_view> EventReader::text(Field field, Skip otherwise) {
  const auto header = this->field(field);
  if (!header) return std::nullopt;
  if (header->kind != Kind::text) throw Unusable{otherwise};
  return utf8(header->size, otherwise);
}

std::string_view EventReader::utf8(std::size_t size, Skip otherwise) {
  const std::string_view text = reader_.take_text(size);
  if (!msgpack::is_utf8(text)) throw Unusable{otherwise};
  return text;
}

// Media as engines write them, in any case; `tests/oracles/event_batch.py` says who sends which.
void EventReader::tier(Event& event) {
  struct Medium {
    std::string_view name;
    std::uint8_t tier;
  };
  constexpr std::array<Medium, 15> kMedia = {{{"gpu", 0}, {"device", 0}, {"cpu", 1},
      {"cpu_pinned", 1}, {"cpu_tier1", 1}, {"host", 1}, {"host_pinned", 1}, {"cpu_tier2", 2},
      {"disk", 2}, {"storage", 2}, {"external", 2}, {"fs", 2}, {"obj", 2}, {"nvme", 2},
      {"ssd", 2}}};
  const std::string_view told = text(kMedium, Skip::medium).value_or("GPU");
  if (told == "GPU" && at_[kLocality] == nullptr) return;  // tier 0
  const auto* found = std::find_if(kMedia.begin(), kMedia.end(), [&](const Medium& medium) {
    return is_in_any_case(told, medium.name);
  });
  if (found == kMedia.end()) unknown_medium(told, "");
  event.tier = found->tier;
  const std::optional<std::string_view> locality = text(kLocality, Skip::field);
  if (!locality || is_in_any_case(*locality, "local")) return;
  if (event.tier == 0) unknown_medium(told, *locality);  // no GPU of this worker
  event.tier = kFarTier;
}

void EventReader::unknown_medium(std::string_view medium, std::string_view locality) {
  std::string name(medium);
  if (!locality.empty()) name.append(" ").append(locality);
  if (name.size() > EventBatch::kMaxMediumBytes) {
    std::size_t size = EventBatch::kMaxMediumBytes;
    while ((name[size] & 0xC0) == 0x80) --size;  // no half characters
    name.resize(size);
  }
  auto& media = batch_.unknown_media_;
  const auto named = [&] {
    return std::find_if(media.begin(), media.end(), [&](const auto& m) { return m.first == name; });
  };
  if (named() == media.end()) {
    if (media.size() >= EventBatch::kMaxMedia) name.clear();
    if (named() == media.end()) media.emplace_back(name, 0);
  }
  ++named()->second;
  throw Unusable{Skip::medium};
}

Piece EventReader::keep(std::string_view text) {
  const Piece piece{static_cast<std::uint32_t>(batch_.text_.size()),
                    static_cast<std::uint32_t>(text.size())};
  batch_.text_ += text;
  return piece;
}

}  // namespace kv
