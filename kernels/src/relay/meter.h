// What is read of a body on its way through: how many events, and the usage at its end. No I/O;
// the twin is `router/upstream/meter.py`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kv::relay {

// Counts events and keeps the end of one body. Lifetime: request.
class Meter {
 public:
  void begin(bool event_stream, std::size_t tail_bytes) {
    event_stream_ = event_stream;
    tail_bytes_ = tail_bytes;
  }

  // Notes the next bytes of the body, free of chunk framing.
  void feed(std::string_view payload);

  std::uint64_t events() const { return events_; }

  std::string_view tail() const {
    const std::string_view text = tail_;
    return text.size() > tail_bytes_ ? text.substr(text.size() - tail_bytes_) : text;
  }

  // From the brace of the last usage object within the kept end, to that end; empty without one.
  std::string_view usage() const;

 private:
  void count(std::string_view payload);

  bool event_stream_ = false;
  std::size_t tail_bytes_ = 0;
  std::uint64_t events_ = 0;
  std::string tail_;           // at most twice `tail_bytes_`
  std::string carry_ = "\n";  // the end of the last payload: a line may be split anywhere
};

}  // namespace kv::relay
