// Reads JSON (RFC 8259) strictly, front to back, without building values.
//
// It is made for bodies that nearly always are plain: whatever is malformed or out of the ordinary
// raises `Unusual`, and who called reads the bytes with a parser that can say what is wrong.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace kv {

// What this reader leaves to a complete parser; not necessarily a fault.
struct Unusual {};

inline constexpr int kJsonDepth = 64;  // of arrays and objects within each other

// Where the parts of a string go: bytes as they are, and characters that were escaped.
struct Dropped {
  void run(const std::uint8_t*, std::size_t) {}
  void escaped(std::uint32_t) {}
};

// Writes UTF-8 of a character, at most 4 bytes; returns the end.
inline std::uint8_t* write_utf8(std::uint8_t* out, std::uint32_t character) {
  const auto tail = [&](int shift) {
    *out++ = static_cast<std::uint8_t>(0x80 | (character >> shift & 0x3F));
  };
  if (character < 0x80) {
    *out++ = static_cast<std::uint8_t>(character);
  } else if (character < 0x800) {
    *out++ = static_cast<std::uint8_t>(0xC0 | character >> 6);
    tail(0);
  } else if (character < 0x10000) {
    *out++ = static_cast<std::uint8_t>(0xE0 | character >> 12);
    tail(6);
    tail(0);
  } else {
    *out++ = static_cast<std::uint8_t>(0xF0 | character >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
  return out;
}

// Hands a sink a character as the bytes of its UTF-8.
template <class Sink>
void run_utf8(Sink& sink, std::uint32_t character) {
  std::array<std::uint8_t, 4> utf8{};
  const std::uint8_t* end = write_utf8(utf8.data(), character);
  sink.run(utf8.data(), static_cast<std::size_t>(end - utf8.data()));
}

// All of a string, its escapes resolved.
struct WholeText {
  std::string text;

  void run(const std::uint8_t* from, std::size_t size) {
    text.append(reinterpret_cast<const char*>(from), size);
  }
  void escaped(std::uint32_t character) { run_utf8(*this, character); }
};

// Lifetime: one reading. The bytes must outlive it.
class JsonReader {
 public:
  explicit JsonReader(std::span<const std::uint8_t> text)
      : at_(text.data()), end_(text.data() + text.size()) {}

  // Where it stands.
  const std::uint8_t* at() const { return at_; }

  // The next byte that is not a blank, which stays; 0 at the end (no JSON has it there).
  std::uint8_t next() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    return at_ < end_ ? *at_ : std::uint8_t{0};
  }

  // Takes `wanted` where it is the next byte but blanks.
  bool accept(char wanted) {
    if (next() != static_cast<std::uint8_t>(wanted)) return false;
    ++at_;
    return true;
  }

  void expect(char wanted) {
    if (!accept(wanted)) throw Unusual{};
  }

  // The bytes `word` are next, without blanks before them.
  void word(std::string_view word) {
    if (static_cast<std::size_t>(end_ - at_) < word.size() ||
        std::memcmp(at_, word.data(), word.size()) != 0) {
      throw Unusual{};
    }
    at_ += word.size();
  }

  bool accept_null() {
    if (next() != 'n') return false;
    word("null");
    return true;
  }

  bool boolean() {
    if (next() == 't') {
      word("true");
      return true;
    }
    word("false");
    return false;
  }

  // The end of the text; blanks may come before it.
  void expect_end() {
    if (next() != 0 || at_ != end_) throw Unusual{};
  }

  // A string, whose bytes are UTF-8 without surrogates, into `sink`: `run(from, size)` for bytes
  // in a row, `escaped(character)` for each escape sequence or pair of surrogates.
  template <class Sink>
  void string(Sink& sink) {
    expect('"');
    for (;;) {
      const std::uint8_t* from = at_;
      to_special();
      if (at_ > from) sink.run(from, static_cast<std::size_t>(at_ - from));
      if (at_ == end_) throw Unusual{};
      if (*at_++ == '"') return;
      sink.escaped(escape());  // to_special stops at nothing else but a backslash
    }
  }

  // A number in the row of digits and signs it is written in, and whether it is an integer. At
  // most 32 bytes, and exponents of two digits: beyond them parsers differ.
  struct Number {
    std::string_view text;
    bool is_integer;
  };
  Number number();

  // A number of any length, checked and dropped.
  void skip_number() { written_number(); }

  // An integer within the limits, without a fraction or exponent; `least` is at least -2^62.
  std::int64_t integer(std::int64_t least, std::int64_t most);

  // Any value, checked and dropped. `depth` is how many arrays and objects are open.
  void skip(int depth);

  // Calls `member()` with the reader before each key of an object; it reads the key and value.
  template <class Member>
  void object(Member member) {
    expect('{');
    if (accept('}')) return;
    do {
      member();
    } while (accept(','));
    expect('}');
  }

  // Calls `item()` with the reader before each value of an array. False where it is empty.
  template <class Item>
  bool array(Item item) {
    expect('[');
    if (accept(']')) return false;
    do {
      item();
    } while (accept(','));
    expect(']');
    return true;
  }

 private:
  void to_special();
  void past_utf8();
  void digits();
  std::ptrdiff_t written_number();
  std::uint32_t escape();
  std::uint32_t hex4();

  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

}  // namespace kv
