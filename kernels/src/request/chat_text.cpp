#include "request/chat_text.h"

#include <algorithm>
#include <array>

namespace kv {
namespace {

constexpr std::size_t kKeys = 64;  // of one object; each new one is compared with all of them
constexpr std::size_t kDigits = 18;  // of an integer without its sign: each parser holds it exactly

// Parts whose content is text; `router/request/prompts.py` has the same list.
constexpr std::array<std::string_view, 5> kTextParts = {
    "\"text\"", "\"input_text\"", "\"output_text\"", "\"refusal\"", "\"thinking\""};

// Writes a string as compact JSON has it: UTF-8, and escapes only where there must be one.
struct Compact {
  std::uint8_t*& out;

  void run(const std::uint8_t* from, std::size_t size) {
    std::memcpy(out, from, size);
    out += size;
  }

  void escaped(std::uint32_t character) {
    switch (character) {
      case '"': return pair('"');
      case '\\': return pair('\\');
      case '\b': return pair('b');
      case '\f': return pair('f');
      case '\n': return pair('n');
      case '\r': return pair('r');
      case '\t': return pair('t');
      default: break;
    }
    if (character >= 0x20) {
      out = write_utf8(out, character);
      return;
    }
    std::memcpy(out, "\\u00", 4);
    out[4] = static_cast<std::uint8_t>('0' + (character >> 4));
    out[5] = static_cast<std::uint8_t>("0123456789abcdef"[character & 0xF]);
    out += 6;
  }

  void pair(char letter) {
    *out++ = '\\';
    *out++ = static_cast<std::uint8_t>(letter);
  }
};

}  // namespace

std::size_t ChatText::messages(std::size_t most) {
  std::size_t count = 0;
  reader_.array([&] {
    if (++count > most) throw Unusual{};
    message();
  });
  return count;
}

void ChatText::tools() {
  std::uint8_t* from = out_;
  std::size_t count = 0;
  array([&] {
    ++count;
    value(2);
  });
  if (count == 0) out_ = from;
}

// A string; returns what was written of it, with its quotes.
std::string_view ChatText::text() {
  std::uint8_t* from = out_;
  put('"');
  Compact sink{out_};
  reader_.string(sink);
  put('"');
  return {reinterpret_cast<const char*>(from), static_cast<std::size_t>(out_ - from)};
}

void ChatText::put_word(std::string_view word) {
  reader_.word(word);
  std::memcpy(out_, word.data(), word.size());
  out_ += word.size();
}

void ChatText::number() {
  const auto [digits, is_integer] = reader_.number();
  const std::size_t sign = digits.front() == '-' ? 1 : 0;
  if (!is_integer || digits.size() - sign > kDigits || digits == "-0") throw Unusual{};
  std::memcpy(out_, digits.data(), digits.size());
  out_ += digits.size();
}

// An object whose `member(key)` is called before each value.
template <class Member>
void ChatText::object(Member member) {
  const std::size_t base = keys_.size();
  put('{');
  reader_.object([&] {
    if (keys_.size() > base) put(',');
    const std::string_view key = text();
    if (keys_.size() - base == kKeys) throw Unusual{};
    const auto twice = [&](const Key& other) {
      return other.size == key.size() && std::memcmp(other.text, key.data(), key.size()) == 0;
    };
    if (std::any_of(keys_.begin() + static_cast<std::ptrdiff_t>(base), keys_.end(), twice)) {
      throw Unusual{};
    }
    keys_.push_back({reinterpret_cast<const std::uint8_t*>(key.data()), key.size()});
    reader_.expect(':');
    put(':');
    member(key);
  });
  put('}');
  keys_.resize(base);
}

template <class Item>
void ChatText::array(Item item) {
  bool is_first = true;
  put('[');
  reader_.array([&] {
    if (!is_first) put(',');
    is_first = false;
    item();
  });
  put(']');
}

void ChatText::value(int depth) {
  if (depth > kJsonDepth) throw Unusual{};
  switch (reader_.next()) {
    case '"': text(); return;
    case 'n': put_word("null"); return;
    case 't': put_word("true"); return;
    case 'f': put_word("false"); return;
    case '[': array([&] { value(depth + 1); }); return;
    case '{': object([&](std::string_view) { value(depth + 1); }); return;
    default: number();
  }
}

void ChatText::message() {
  bool has_role = false;
  object([&](std::string_view key) {
    if (key == "\"role\"") {
      has_role = text().size() > 2;
    } else if (key == "\"content\"") {
      content();
    } else {
      value(3);
    }
  });
  if (!has_role) throw Unusual{};
}

void ChatText::content() {
  switch (reader_.next()) {
    case '"': text(); return;
    case 'n': put_word("null"); return;
    case '[':
      array([&] {
        if (reader_.next() == '"') {
          text();
        } else {
          part();
        }
      });
      return;
    default: throw Unusual{};
  }
}

void ChatText::part() {
  bool has_type = false;
  bool needs_text = false;
  bool has_text = false;
  object([&](std::string_view key) {
    if (key == "\"type\"") {
      const std::string_view type = text();
      has_type = std::find(kTextParts.begin(), kTextParts.end(), type) != kTextParts.end();
      if (!has_type) throw Unusual{};  // a medium, whose bytes a digest stands for
      needs_text = type == kTextParts[0];
    } else if (key == "\"text\"") {
      has_text = reader_.next() == '"';
      value(5);
    } else {
      value(5);
    }
  });
  if (!has_type || (needs_text && !has_text)) throw Unusual{};
}

}  // namespace kv
