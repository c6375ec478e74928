// A client's head, read as strictly as `router/http/parser.py` does. No I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace kv {

struct HeadField {
  std::string_view name, value;  // as it came, blanks round the value left out
};

// A head that goes on as it came; views into the text it was read from.
struct PlainHead {
  std::string_view method;
  std::string_view target;  // begins with "/", ASCII
  std::vector<HeadField> fields;
  std::uint64_t length = 0;  // of the body, bytes
  bool last = false;         // the connection ends after it

  // The first value under a name, whose letters count without case.
  std::optional<std::string_view> get(std::string_view name) const;
};

// Reads a head with its empty line. Nothing where it is to be refused, rewritten, or rare
// (HTTP/1.0, a target with a scheme): the caller reads it in another way.
std::optional<PlainHead> read_plain_head(std::string_view text);

}  // namespace kv
