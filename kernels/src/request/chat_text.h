// A chat's messages and tools as compact JSON, the text that stands for its tokens where there is
// no tokenizer; what `router/request/prompts.py` makes of them by way of Python's objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/json_reader.h"

namespace kv {

// Writes what it reads to `out`, which must have room for all that is left to read: no value is
// longer in compact JSON than it was. Left to a complete parser, by `Unusual`: keys that occur
// twice in an object, more than 64 of them, numbers other than integers of up to 18 digits, media,
// and what no chat may have. Lifetime: one reading.
class ChatText {
 public:
  ChatText(JsonReader& reader, std::uint8_t* out) : reader_(reader), out_(out) {}

  // The `messages`, one after another with nothing between them; returns how many. Throws as soon
  // as there are more than `most`.
  std::size_t messages(std::size_t most);

  // The array `tools` as it is; nothing where it is empty.
  void tools();

  std::uint8_t* end() const { return out_; }

 private:
  struct Key {
    const std::uint8_t* text;  // with its quotes, within what was written
    std::size_t size;
  };

  std::string_view text();
  void value(int depth);
  void number();
  void message();
  void content();
  void part();
  template <class Member>
  void object(Member member);
  template <class Item>
  void array(Item item);
  void put(char byte) { *out_++ = static_cast<std::uint8_t>(byte); }
  void put_word(std::string_view word);

  JsonReader& reader_;
  std::uint8_t* out_;
  std::vector<Key> keys_;  // of the objects that are open, the innermost one's last
};

}  // namespace kv
