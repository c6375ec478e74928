// Heads of replies: the worker's read strictly, then written anew for the client. No I/O; the twin
// of `parse_head` is `tests/oracles/reply_head.py`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "relay/terms.h"

namespace kv::relay {

// How a reply's body ends (RFC 9112, section 6.3).
enum class Framing : std::uint8_t { none, length, chunked, close };

struct Field {
  std::string_view name, value;
};

// A worker's reply before its body; views into the text it was read from.
struct ReplyHead {
  int status = 0;
  std::string_view reason;
  std::vector<Field> fields;
  Framing framing = Framing::none;
  std::uint64_t length = 0;
  bool reusable = true;  // the worker keeps the connection open after this reply
  bool event_stream = false;
  bool retry_after = false;
  bool coded = false;  // compressed, say
};

// What a head of a client's reply depends on besides the worker's.
struct ClientTerms {
  std::string extra_lines;  // headers of the router's own, each with its CRLF
  bool keep_alive = true;
};

// Reads a status line and fields, each with its CRLF, without the empty line. Throws Broken for
// anything that two readers could frame differently.
ReplyHead parse_head(std::string_view head, bool head_request);

// The head that the client gets, with the empty line; `persistent`: its connection goes on.
// `rechunked`: the body comes in chunks of ours, whatever the worker's framing. `ours_at`: set to
// where the lines of the router's own begin.
std::string client_head(const ReplyHead& head, const ClientTerms& client, bool persistent,
                        bool rechunked, std::size_t& ours_at);

// A header that the router alone says to clients: an engine's would be believed in its place.
bool is_ours(std::string_view name);

// Where RFC 9110, sections 5.5 and 5.6.2, let a byte stand: in a field's value, in a name.
bool is_value_byte(unsigned char byte);
bool is_token_byte(unsigned char byte);

}  // namespace kv::relay
