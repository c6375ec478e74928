// The nouns of the native relay: bounds, times, and what can go wrong with one request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kv::relay {

// The bounds of one worker's connections; `router/http/reply.py` says what each means.
struct Limits {
  std::size_t max_connections = 4096;
  double idle_s = 30.0;
  std::size_t header_bytes = 65'536;
  std::size_t chunk_line_bytes = 4'096;
  std::size_t held_bytes = 65'536;
  double held_s = 1.0;
  std::size_t tail_bytes = 8'192;
  double progress_s = 0.05;
};

// How long each step of one request may take, in seconds.
struct Timeouts {
  double connect_s = 5.0;
  double send_s = 30.0;
  double first_byte_s = 600.0;
  double between_s = 120.0;
  double client_s = 120.0;
};

// How one request failed; named as `router/http/errors.py` names it.
enum class Fault : std::uint8_t {
  none,
  busy,
  out_of_files,
  connect,
  timeout_connect,
  early_close,
  timeout_send,
  timeout_first_byte,
  timeout_between,
  garbage,
  status_5xx,
  no_answer,
  slow_client,
  client_closed,
  cancelled,
};

const char* name_of(Fault fault);

struct Failure {
  Fault fault = Fault::none;
  std::string message;

  explicit operator bool() const { return fault != Fault::none; }
};

// A reply that cannot be relayed further. Stays within the relay.
struct Broken : std::runtime_error {
  Broken(Fault is, const std::string& message) : std::runtime_error(message), fault(is) {}
  Fault fault;
};

inline Broken garbage(const std::string& message) { return {Fault::garbage, message}; }

}  // namespace kv::relay
