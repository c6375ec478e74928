// Where the wanted fields of a JSON object lie, and how much each holds.
//
// It is told before a parser builds values of a body, which takes a thousand times as long where
// a body is made of many small ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kv {

inline constexpr int kBodyDepth = 256;  // of arrays and objects within each other

// One field of the object; offsets are bytes of the body. Lifetime: request.
struct BodyField {
  std::int64_t begin = -1;  // of its value; -1: the object has no such field
  std::int64_t end = -1;
  std::int64_t values = 0;  // the value itself and all that are within it
  std::int64_t items = 0;   // of an array
  // Bytes of strings with escapes or beyond ASCII, which cost a parser ten times as much as
  // others: those of the item of the array that has most of them, else those of the whole value.
  std::int64_t text_bytes = 0;
};

enum class BodyFault { kNone, kMalformed, kTooDeep, kNoObject };

// Reads any JSON that Python's parser takes, but for strings with half a pair of surrogates.
// Lifetime: request.
class BodyFields {
 public:
  BodyFields(std::span<const std::uint8_t> body, std::span<const std::string> names);

  BodyFault fault = BodyFault::kNone;
  std::size_t at = 0;             // where reading ended
  std::vector<BodyField> fields;  // as the names; of equal keys the last one counts
};

// Where the items of a JSON array lie, begin and end of each in turn; nothing where it is none, or
// has more than `most`.
std::optional<std::vector<std::int64_t>> json_items(std::span<const std::uint8_t> array,
                                                    std::size_t most);

// Token ids, as far as the items of a JSON array are such. Lifetime: request.
struct TokenIds {
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> wide;  // instead of `ids`, where not all items are int32
  bool all = false;   // the array has nothing else
  std::size_t at = 0;  // else: where the first item lies that is none
};
TokenIds token_ids(std::span<const std::uint8_t> array);

// A JSON string as UTF-8; nothing where it is none.
std::optional<std::string> json_text(std::span<const std::uint8_t> text);

}  // namespace kv
