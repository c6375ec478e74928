#include "relay/meter.h"

#include <algorithm>

namespace kv::relay {

namespace {

constexpr std::string_view kEvent = "\ndata:";
constexpr std::string_view kKey = "\"usage\"";
constexpr std::string_view kBlank = " \t\r\n";

std::uint64_t occurrences(std::string_view text) {
  std::uint64_t count = 0;
  for (std::size_t at = text.find(kEvent); at != std::string_view::npos;
       at = text.find(kEvent, at + kEvent.size())) {
    ++count;
  }
  return count;
}

}  // namespace

void Meter::feed(std::string_view payload) {
  if (event_stream_) count(payload);
  if (payload.size() >= tail_bytes_) {
    tail_.assign(payload.substr(payload.size() - tail_bytes_));
    return;
  }
  if (tail_.size() + payload.size() > 2 * tail_bytes_) {
    tail_.erase(0, tail_.size() + payload.size() - tail_bytes_);
  }
  tail_.append(payload);
}

void Meter::count(std::string_view payload) {
  constexpr std::size_t kPart = kEvent.size() - 1;  // longest part of it that a cut leaves over
  carry_.append(payload.substr(0, kPart));
  events_ += occurrences(carry_) + occurrences(payload);
  if (payload.size() >= kPart) {
    carry_.assign(payload.substr(payload.size() - kPart));
  } else if (carry_.size() > kPart) {
    carry_.erase(0, carry_.size() - kPart);
  }
}

std::string_view Meter::usage() const {
  const std::string_view text = tail();
  for (std::size_t at = text.rfind(kKey); at != std::string_view::npos;
       at = at == 0 ? std::string_view::npos : text.rfind(kKey, at - 1)) {
    // Quotes inside JSON strings are escaped, so this can only be a key; null has no brace.
    const std::size_t colon = text.find_first_not_of(kBlank, at + kKey.size());
    if (colon == std::string_view::npos || text[colon] != ':') continue;
    const std::size_t brace = text.find_first_not_of(kBlank, colon + 1);
    if (brace != std::string_view::npos && text[brace] == '{') return text.substr(brace);
  }
  return {};
}

}  // namespace kv::relay
