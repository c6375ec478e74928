// Where a reply's body ends, found without copying it. No I/O; the twin is
// `router/http/framing.py`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "relay/head.h"
#include "relay/terms.h"

namespace kv::relay {

// A body, followed as its bytes arrive. Lifetime: request.
class Body {
 public:
  // Pieces of the payload within one `feed`, free of chunk framing.
  using Payload = std::vector<std::string_view>;

  void begin(const ReplyHead& head, const Limits& limits);

  // Notes the pieces in `payload`, returns how many bytes of `data` belong to this body. Throws
  // Broken for broken framing.
  std::size_t feed(std::string_view data, Payload& payload);

  bool done() const { return done_; }
  void end() { done_ = true; }  // where the connection did

 private:
  std::size_t skip_chunk(std::string_view data, std::size_t at, Payload& payload);
  std::size_t read_line(std::string_view data, std::size_t at);
  void begin_chunk(std::string_view line);
  void end_trailer(std::string_view line);

  Framing framing_ = Framing::none;
  bool done_ = true;
  bool in_trailers_ = false;
  std::uint64_t left_ = 0;  // of the body, or of the present chunk with its CRLF
  std::size_t line_bytes_ = 0;
  std::size_t trailer_left_ = 0;
  std::string line_;  // a size line or trailer of which only the beginning has come
};

}  // namespace kv::relay
