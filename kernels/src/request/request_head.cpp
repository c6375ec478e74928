#include "request/request_head.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace kv {

namespace {

constexpr std::size_t kMaxHeaders = 128;
constexpr std::size_t kMaxLengthDigits = 15;

constexpr std::array<std::string_view, 7> kMethods = {"POST", "GET",   "HEAD",  "OPTIONS",
                                                      "PUT",  "PATCH", "DELETE"};
// May stand in a head once.
constexpr std::array<std::string_view, 10> kAlone = {
    "host", "content-length",   "content-type",  "user-agent",   "authorization",
    "etag", "content-location", "content-range", "max-forwards", "server"};
constexpr std::size_t kHost = 0, kContentLength = 1;
// Never in a head that goes on as it came.
constexpr std::array<std::string_view, 6> kUnusual = {
    "expect", "transfer-encoding", "transfer_encoding", "content_length", "upgrade",
    "http2-settings"};
// What only routers say to engines: beginnings of names, where an underscore counts as a dash.
constexpr std::array<std::string_view, 7> kPrivate = {
    "x-warmroute-internal-", "x-data-parallel-", "x-prefiller-",         "x-encoder-hosts-",
    "x-kv-cache-source-",    "x-override-",      "x-gateway-destination-"};

enum : std::uint8_t { kToken = 1, kValue = 2, kTarget = 4 };

constexpr std::array<std::uint8_t, 256> kClasses = [] {
  std::array<std::uint8_t, 256> classes{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool digit = byte >= '0' && byte <= '9';
    const bool letter = (byte | 32) >= 'a' && (byte | 32) <= 'z';
    const bool sign =
        std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(byte)) != std::string_view::npos;
    std::uint8_t flags = 0;
    if (digit || letter || sign) flags |= kToken;
    if (byte == '\t' || (byte >= 0x20 && byte != 0x7f)) flags |= kValue;
    if (byte > 0x20 && byte < 0x7f && byte != '#') flags |= kTarget;
    classes[byte] = flags;
  }
  return classes;
}();

bool is(char c, std::uint8_t kind) {
  return (kClasses[static_cast<unsigned char>(c)] & kind) != 0;
}

char lowered(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

bool same(std::string_view text, std::string_view lower) {
  return text.size() == lower.size() &&
         std::equal(text.begin(), text.end(), lower.begin(),
                    [](char a, char b) { return lowered(a) == b; });
}

bool begins(std::string_view name, std::string_view dashed) {
  return name.size() >= dashed.size() &&
         std::equal(dashed.begin(), dashed.end(), name.begin(),
                    [](char a, char b) { return a == lowered(b) || (a == '-' && b == '_'); });
}

std::string_view stripped(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Takes from the front of `text` what is of a kind.
std::string_view run(std::string_view& text, std::uint8_t kind) {
  std::size_t size = 0;
  while (size < text.size() && is(text[size], kind)) ++size;
  const std::string_view found = text.substr(0, size);
  text.remove_prefix(size);
  return found;
}

bool take(std::string_view& text, std::string_view wanted) {
  if (!text.starts_with(wanted)) return false;
  text.remove_prefix(wanted.size());
  return true;
}

bool read_line(std::string_view& text, PlainHead& head) {
  const auto method = std::find_if(kMethods.begin(), kMethods.end(), [&](std::string_view one) {
    return text.starts_with(one) && text.size() > one.size() && text[one.size()] == ' ';
  });
  if (method == kMethods.end()) return false;
  head.method = text.substr(0, method->size());
  text.remove_prefix(method->size() + 1);
  head.target = run(text, kTarget);
  return head.target.starts_with('/') && take(text, " HTTP/1.1\r\n");
}

bool read_field(std::string_view& text, HeadField& field) {
  field.name = run(text, kToken);
  if (field.name.empty() || !take(text, ":")) return false;
  field.value = stripped(run(text, kValue));
  return take(text, "\r\n");
}

bool read_length(std::string_view digits, std::uint64_t& length) {
  if (digits.empty() || digits.size() > kMaxLengthDigits) return false;
  for (const char c : digits) {
    if (c < '0' || c > '9') return false;
    length = length * 10 + static_cast<std::uint64_t>(c - '0');
  }
  return true;
}

// Whether the field lets the head go on as it came; `seen` has a bit for each of kAlone.
bool plain(const HeadField& field, unsigned& seen, PlainHead& head) {
  const char first = lowered(field.name.front());
  if (first == 'x') {
    const auto dashed = [&](std::string_view prefix) { return begins(field.name, prefix); };
    if (std::any_of(kPrivate.begin(), kPrivate.end(), dashed)) return false;
    const bool id = same(field.name, "x-request-id") || same(field.name, "x_request-id");
    return !id || field.value.find("___") == std::string_view::npos;
  }
  for (std::size_t i = 0; i < kAlone.size(); ++i) {
    if (kAlone[i].front() != first || !same(field.name, kAlone[i])) continue;
    if ((seen >> i & 1) != 0) return false;
    seen |= 1U << i;
    return i != kContentLength || read_length(field.value, head.length);
  }
  if (first == 'c' && same(field.name, "connection")) {
    head.last = head.last || same(field.value, "close");
    return same(field.value, "close") || same(field.value, "keep-alive");
  }
  return std::none_of(kUnusual.begin(), kUnusual.end(),
                      [&](std::string_view name) { return same(field.name, name); });
}

}  // namespace

std::optional<std::string_view> PlainHead::get(std::string_view name) const {
  for (const HeadField& field : fields) {
    if (field.name.size() == name.size() &&
        std::equal(name.begin(), name.end(), field.name.begin(),
                   [](char a, char b) { return lowered(a) == lowered(b); })) {
      return field.value;
    }
  }
  return std::nullopt;
}

std::optional<PlainHead> read_plain_head(std::string_view text) {
  PlainHead head;
  if (!read_line(text, head)) return std::nullopt;
  head.fields.reserve(16);
  unsigned seen = 0;
  while (!take(text, "\r\n")) {
    HeadField field;
    if (head.fields.size() == kMaxHeaders || !read_field(text, field) ||
        !plain(field, seen, head)) {
      return std::nullopt;
    }
    head.fields.push_back(field);
  }
  if (!text.empty() || (seen >> kHost & 1) == 0) return std::nullopt;
  return head;
}

}  // namespace kv
