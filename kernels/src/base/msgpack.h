// A pull parser of msgpack: one header at a time, nothing is made that nobody asked for, so hostile
// bytes cost no more than their length. `tests/oracles/event_batch.py` refuses the same bytes for
// the same reason. Format: msgpack specification, 2017.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>

namespace kv::msgpack {

// The bytes are not what they should be; what() says why.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Kind : std::uint8_t { integer, nil, boolean, real, text, binary, array, map, ext };

// What begins at a place. `value`: an integer modulo 2^64, or the bits of a double. `size`: bytes
// that follow, or elements, or pairs of a map; at least a byte each was seen to be there.
struct Header {
  Kind kind;
  bool negative = false;
  std::uint64_t value = 0;
  std::size_t size = 0;

  bool within(std::uint64_t least, std::uint64_t most) const {
    return kind == Kind::integer && !negative && value >= least && value <= most;
  }
};

// Throws Malformed where the bytes end early or are no msgpack. Lifetime: the bytes'.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  const std::uint8_t* at() const { return at_; }
  void go(const std::uint8_t* at) { at_ = at; }
  std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }

  // The header here; goes past it, and past a number that it brings.
  Header header() {
    const std::uint8_t first = *take(1);
    if (first < 0x80) return {Kind::integer, false, first};
    if (first >= 0xE0) return {Kind::integer, true, first | ~std::uint64_t{0xFF}};
    if (first < 0x90) return sized(Kind::map, first & 0x0FU);
    if (first < 0xA0) return sized(Kind::array, first & 0x0FU);
    if (first < 0xC0) return sized(Kind::text, first & 0x1FU);
    return marked(first);
  }

  // The next `size` bytes.
  const std::uint8_t* take(std::size_t size) {
    if (size > left()) early();
    const std::uint8_t* taken = at_;
    at_ += size;
    return taken;
  }

  std::string_view take_text(std::size_t size) {
    return {reinterpret_cast<const char*>(take(size)), size};
  }

  // Reads `count` small ints in a row, each 0..2^31-1, without a branch a number: token ids, nearly
  // all there is. False, and nowhere gone, where one of them is something else.
  bool take_ints(std::size_t count, std::int32_t* ints) {
    const std::size_t size = left();
    std::size_t at = 0;
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (at >= size) return false;
      std::uint64_t word = 0;
      std::memcpy(&word, at_ + at, size - at >= sizeof word ? sizeof word : size - at);
      const Small form = kSmall[at_[at]];
      const std::uint64_t value = __builtin_bswap64(word) >> form.shift & form.mask;
      wrong |= value >> 31 | form.other;
      ints[i] = static_cast<std::int32_t>(value);
      at += form.size;
    }
    if (wrong != 0 || at > size) return false;
    at_ += at;
    return true;
  }

  // Goes past `count` 64-bit ints in a row, which hashes mostly are. False, and nowhere gone, where
  // one of them is something else.
  bool skip_words(std::size_t count) {
    if (count > left() / kWordBytes) return false;
    std::uint8_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint8_t mark = at_[i * kWordBytes];
      wrong |= static_cast<std::uint8_t>((mark != 0xCF) & (mark != 0xD3));
    }
    if (wrong != 0) return false;
    at_ += count * kWordBytes;
    return true;
  }

  // Reads so many that `skip_words` went past, modulo 2^64.
  void take_words(std::size_t count, std::uint64_t* words) {
    const std::uint8_t* from = take(count * kWordBytes);
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(&words[i], from + i * kWordBytes + 1, sizeof words[i]);
      words[i] = __builtin_bswap64(words[i]);
    }
  }

  // Whether the value here is nil.
  bool at_nil() const { return at_ != end_ && *at_ == 0xC0; }

  // Goes past one value, whatever it holds. No recursion: it counts what is still to come.
  void skip() {
    for (std::uint64_t values = 1; values > 0;) {
      --values;
      if (at_ != end_ && (*at_ < 0x80 || *at_ >= 0xE0 || *at_ == 0xC0)) {  // small ints, nil
        ++at_;
        continue;
      }
      const Header next = header();
      if (next.kind == Kind::text || next.kind == Kind::binary || next.kind == Kind::ext) {
        take(next.size);
      } else if (next.kind == Kind::array || next.kind == Kind::map) {
        values += next.kind == Kind::map ? 2 * std::uint64_t{next.size} : next.size;
        if (values > left()) early();
      }
    }
  }

 private:
  static constexpr std::size_t kWordBytes = 9;  // a 64-bit int with its mark

  // How an int that begins with a byte lies in the eight bytes there, read big-endian.
  struct Small {
    std::uint8_t size;
    std::uint8_t shift;
    std::uint8_t other;  // 1: it is no such int
    std::uint32_t mask;
  };

  static constexpr std::array<Small, 256> kSmall = [] {
    std::array<Small, 256> forms{};
    forms.fill({0, 0, 1, 0});
    for (std::size_t first = 0; first < 0x80; ++first) forms[first] = {1, 56, 0, 0xFF};
    forms[0xCC] = {2, 48, 0, 0xFF};
    forms[0xCD] = {3, 40, 0, 0xFFFF};
    forms[0xCE] = {5, 24, 0, 0xFFFFFFFF};
    return forms;
  }();

  [[noreturn]] static void early() { throw Malformed("it ends within a value"); }

  Header sized(Kind kind, std::size_t size) const {
    if ((kind == Kind::map ? 2 * size : size) > left()) early();
    return {kind, false, 0, size};
  }

  template <class Number>
  Number number() {
    static_assert(std::endian::native == std::endian::little);
    const std::uint8_t* from = take(sizeof(Number));
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < sizeof(Number); ++i) word = word << 8 | from[i];
    Number value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }

  template <class Number>
  Header integer() {
    const Number value = number<Number>();
    return {Kind::integer, value < Number{0},
            static_cast<std::uint64_t>(static_cast<std::int64_t>(value))};
  }

  Header marked(std::uint8_t first) {
    switch (first) {
      case 0xC0: return {Kind::nil};
      case 0xC2:
      case 0xC3: return {Kind::boolean};
      case 0xC4: return sized(Kind::binary, number<std::uint8_t>());
      case 0xC5: return sized(Kind::binary, number<std::uint16_t>());
      case 0xC6: return sized(Kind::binary, number<std::uint32_t>());
      case 0xC7: return sized(Kind::ext, number<std::uint8_t>() + std::size_t{1});
      case 0xC8: return sized(Kind::ext, number<std::uint16_t>() + std::size_t{1});
      case 0xC9: return sized(Kind::ext, number<std::uint32_t>() + std::size_t{1});
      case 0xCA: return {Kind::real, false, std::bit_cast<std::uint64_t>(double{number<float>()})};
      case 0xCB: return {Kind::real, false, number<std::uint64_t>()};
      case 0xCC: return {Kind::integer, false, number<std::uint8_t>()};
      case 0xCD: return {Kind::integer, false, number<std::uint16_t>()};
      case 0xCE: return {Kind::integer, false, number<std::uint32_t>()};
      case 0xCF: return {Kind::integer, false, number<std::uint64_t>()};
      case 0xD0: return integer<std::int8_t>();
      case 0xD1: return integer<std::int16_t>();
      case 0xD2: return integer<std::int32_t>();
      case 0xD3: return integer<std::int64_t>();
      case 0xD4:
      case 0xD5:
      case 0xD6:
      case 0xD7:
      case 0xD8: return sized(Kind::ext, (std::size_t{1} << (first - 0xD4)) + 1);
      case 0xD9: return sized(Kind::text, number<std::uint8_t>());
      case 0xDA: return sized(Kind::text, number<std::uint16_t>());
      case 0xDB: return sized(Kind::text, number<std::uint32_t>());
      case 0xDC: return sized(Kind::array, number<std::uint16_t>());
      case 0xDD: return sized(Kind::array, number<std::uint32_t>());
      case 0xDE: return sized(Kind::map, number<std::uint16_t>());
      case 0xDF: return sized(Kind::map, number<std::uint32_t>());
      default: throw Malformed("byte 0xc1 begins no msgpack value");
    }
  }

  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

// Whether these bytes are UTF-8 as Python reads it: no surrogates, nothing longer than needed.
bool is_utf8(std::string_view text);

}  // namespace kv::msgpack
