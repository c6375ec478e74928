// What is read of one event of a streamed answer; twin: `router/migration/journal.py`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kv::relay {

// The first choice of a chunk, of a completion or of a chat.
struct Choice {
  std::int64_t index = 0;
  bool says = false;      // it has text for the reader
  bool parsed = false;    // a parser of the engine took part of the answer for something else
  bool opens = false;     // it says that the assistant speaks
  bool ends = false;      // it has a finish reason
  bool given_up = false;  // namely one of an answer that the engine could not finish
  std::vector<std::int32_t> ids;
  std::optional<std::vector<std::int32_t>> prompt;
};

struct Chunk {
  std::size_t choices = 0;
  Choice first;
  std::optional<std::vector<std::int32_t>> prompt;
  bool counted = false;                       // it has a usage
  std::optional<std::int64_t> answer_tokens;  // how long the answer is by that
  bool failed = false;                        // it has an error
  std::optional<std::int64_t> error_code;
};

// The chunk in an event's data. None for what is none, and for JSON out of the ordinary: keys that
// are escaped or come twice, numbers where an id has a fraction, text that is not UTF-8.
std::optional<Chunk> read_chunk(std::string_view data);

// Appends an event, with `hidden` where ids were; empty: without their fields. The twin is
// `splice.without_ids`.
void append_without_ids(std::string_view event, std::string_view hidden, std::string& out);

}  // namespace kv::relay
