#include "base/json_reader.h"

#include <bit>

namespace kv {
namespace {

constexpr std::uint64_t kOnes = 0x0101010101010101ULL;
constexpr std::uint64_t kHighs = 0x8080808080808080ULL;

// The high bit of each byte that is a quote, a backslash, a control character or not ASCII. A byte
// above such a one may be marked wrongly, by a borrow; the lowest mark is right.
std::uint64_t marks(std::uint64_t bytes) {
  const std::uint64_t quote = bytes ^ (kOnes * '"');
  const std::uint64_t backslash = bytes ^ (kOnes * '\\');
  const std::uint64_t below = (quote - kOnes) | (backslash - kOnes) | (bytes - kOnes * 0x20);
  return (below | bytes) & kHighs;
}

bool is_digit(std::uint8_t byte) { return byte >= '0' && byte <= '9'; }

bool is_tail(std::uint8_t byte) { return (byte & 0xC0) == 0x80; }

}  // namespace

// Stands at the string's next quote or backslash afterwards, or at the end of the text.
void JsonReader::to_special() {
  for (;;) {
    while (end_ - at_ >= 8) {
      std::uint64_t bytes;
      std::memcpy(&bytes, at_, sizeof bytes);
      const std::uint64_t marked = marks(bytes);
      if (marked != 0) {
        at_ += std::countr_zero(marked) / 8;
        break;
      }
      at_ += 8;
    }
    while (at_ < end_ && *at_ >= 0x20 && *at_ < 0x80 && *at_ != '"' && *at_ != '\\') ++at_;
    if (at_ == end_ || *at_ == '"' || *at_ == '\\') return;
    while (at_ < end_ && *at_ >= 0x80) past_utf8();
    if (at_ < end_ && *at_ < 0x20) throw Unusual{};
  }
}

// One character of two to four bytes: Unicode 15, table 3-7, "well-formed UTF-8 byte sequences".
void JsonReader::past_utf8() {
  const std::uint8_t first = *at_;
  const auto left = end_ - at_;
  const auto second_within = [&](int low, int high) { return at_[1] >= low && at_[1] <= high; };
  if (first >= 0xC2 && first <= 0xDF) {
    if (left < 2 || !is_tail(at_[1])) throw Unusual{};
    at_ += 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    if (left < 3 || !is_tail(at_[2])) throw Unusual{};
    if (!second_within(first == 0xE0 ? 0xA0 : 0x80, first == 0xED ? 0x9F : 0xBF)) throw Unusual{};
    at_ += 3;
  } else if (first >= 0xF0 && first <= 0xF4) {
    if (left < 4 || !is_tail(at_[2]) || !is_tail(at_[3])) throw Unusual{};
    if (!second_within(first == 0xF0 ? 0x90 : 0x80, first == 0xF4 ? 0x8F : 0xBF)) throw Unusual{};
    at_ += 4;
  } else {
    throw Unusual{};
  }
}

// What follows a backslash.
std::uint32_t JsonReader::escape() {
  if (at_ == end_) throw Unusual{};
  switch (*at_++) {
    case '"': return '"';
    case '\\': return '\\';
    case '/': return '/';
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    case 'u': break;
    default: throw Unusual{};
  }
  const std::uint32_t first = hex4();
  if (first < 0xD800 || first > 0xDFFF) return first;
  word("\\u");
  const std::uint32_t second = hex4();
  if (first > 0xDBFF || second < 0xDC00 || second > 0xDFFF) throw Unusual{};
  return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
}

std::uint32_t JsonReader::hex4() {
  if (end_ - at_ < 4) throw Unusual{};
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint8_t byte = *at_++;
    const std::uint8_t letter = byte | 0x20;
    if (is_digit(byte)) {
      value = value << 4 | static_cast<std::uint32_t>(byte - '0');
    } else if (letter >= 'a' && letter <= 'f') {
      value = value << 4 | static_cast<std::uint32_t>(letter - 'a' + 10);
    } else {
      throw Unusual{};
    }
  }
  return value;
}

void JsonReader::digits() {
  if (at_ == end_ || !is_digit(*at_)) throw Unusual{};
  while (at_ < end_ && is_digit(*at_)) ++at_;
}

// A number, wherever it ends; returns the digits of its exponent, -1 where it is an integer.
std::ptrdiff_t JsonReader::written_number() {
  next();
  std::ptrdiff_t exponent_digits = -1;
  if (at_ < end_ && *at_ == '-') ++at_;
  if (at_ < end_ && *at_ == '0') {
    ++at_;
  } else {
    digits();
  }
  if (at_ < end_ && *at_ == '.') {
    exponent_digits = 0;
    ++at_;
    digits();
  }
  if (at_ < end_ && (*at_ | 0x20) == 'e') {
    ++at_;
    if (at_ < end_ && (*at_ == '+' || *at_ == '-')) ++at_;
    const std::uint8_t* exponent = at_;
    digits();
    exponent_digits = at_ - exponent;
  }
  return exponent_digits;
}

JsonReader::Number JsonReader::number() {
  next();
  const std::uint8_t* from = at_;
  const std::ptrdiff_t exponent_digits = written_number();
  const auto size = static_cast<std::size_t>(at_ - from);
  if (exponent_digits > 2 || size > 32) throw Unusual{};
  return {{reinterpret_cast<const char*>(from), size}, exponent_digits < 0};
}

std::int64_t JsonReader::integer(std::int64_t least, std::int64_t most) {
  next();
  const bool is_negative = at_ < end_ && *at_ == '-';
  if (is_negative) ++at_;
  const std::uint8_t* from = at_;
  std::uint64_t digits = 0;  // 19 of them fit
  while (at_ < end_ && is_digit(*at_) && at_ - from < 19) digits = digits * 10 + (*at_++ - '0');
  const auto size = at_ - from;
  const bool goes_on = at_ < end_ && (is_digit(*at_) || *at_ == '.' || (*at_ | 0x20) == 'e');
  if (size == 0 || goes_on || (*from == '0' && size > 1)) throw Unusual{};
  auto value = static_cast<std::int64_t>(digits);  // from 2^63 on it is below any `least`
  if (is_negative) {
    if (value < 0) throw Unusual{};
    value = -value;
  }
  if (value < least || value > most) throw Unusual{};
  return value;
}

void JsonReader::skip(int depth) {
  if (depth > kJsonDepth) throw Unusual{};
  Dropped dropped;
  switch (next()) {
    case '"': string(dropped); return;
    case 'n': word("null"); return;
    case 't': word("true"); return;
    case 'f': word("false"); return;
    case '[': array([&] { skip(depth + 1); }); return;
    case '{':
      object([&] {
        string(dropped);
        expect(':');
        skip(depth + 1);
      });
      return;
    default: number();
  }
}

}  // namespace kv
