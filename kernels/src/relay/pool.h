// The connections to one worker: kept alive, bounded.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "relay/terms.h"

namespace kv::relay {

struct Job;
struct Pool;

// What epoll tells of: its first member says what it is.
struct Source {
  enum class Kind : std::uint8_t { wake, worker, client } kind;
};

// An address as the system takes it.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

// A numeric address of IPv4 or IPv6. Throws std::invalid_argument.
Address address_of(const std::string& host, std::uint16_t port);

// One TCP connection to a worker, over many exchanges, one at a time. Of the relay's thread.
struct Connection : Source {
  Connection() : Source{Kind::worker} {}

  int fd = -1;
  Pool* pool = nullptr;
  Job* job = nullptr;  // null: idle
  bool connecting = true;
  bool used = false;  // it has carried a whole exchange before the present one
  std::uint32_t watched = 0;
  double idle_since_s = 0.0;
};

// Lifetime: worker. The counts are for anyone to read, the rest is the relay's thread's.
struct Pool {
  explicit Pool(const Limits& bounds) : limits(bounds) {}

  const Limits limits;
  std::atomic<std::size_t> open{0}, idle_count{0};
  std::vector<Address> addresses;
  std::deque<Connection*> idle;  // the one used last stands last
  std::vector<Connection*> all;
  bool closed = false;
};

}  // namespace kv::relay
