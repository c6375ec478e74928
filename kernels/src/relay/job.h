// One request on its way through the relay.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "relay/marks.h"
#include "relay/pool.h"
#include "relay/reply.h"
#include "relay/timers.h"

namespace kv::relay {

// What Python hands over. Lifetime: request.
struct Order {
  std::uint64_t id = 0;
  std::shared_ptr<Pool> pool;
  std::string head;        // of the request, with the empty line
  std::string_view body;   // borrowed until the end is told
  bool head_request = false;
  // Lent by the event loop, which closes it after the end or `cancel`. Below 0 there is no client:
  // the reply is told with its end, if it has at most `client_buffer_bytes`.
  int client_fd = -1;
  ClientTerms client;
  std::size_t client_buffer_bytes = 262'144;
  Timeouts timeouts;
  bool tells = false;      // first byte and progress are asked for
  std::shared_ptr<const JournalTerms> journal;  // null: bytes go on as they come
  answer::Due due;         // what is no such answer is the worker's failure
  bool once = false;       // not sent again where a kept connection turns out to be closed

  std::size_t kept_bytes() const { return client_fd < 0 ? client_buffer_bytes : 0; }
};

// Lifetime: request. All but the gate and what stands with it belongs to the relay's thread.
struct Job {
  struct ClientSource : Source {
    explicit ClientSource(Job* of) : Source{Kind::client}, job(of) {}
    Job* job;
  };

  explicit Job(Order what) : order(std::move(what)), client(this) {}

  const Order order;

  // Held while the client's socket is used: whoever cancels knows that nobody uses it after that.
  std::mutex gate;
  bool cancelled = false;
  std::uint64_t written = 0;  // to the client or kept for it, head included
  bool ends_with_connection = false;  // so that reply's body does
  bool whole = false;                 // that was all of the reply: its end is told in this turn

  ClientSource client;
  Connection* connection = nullptr;
  bool ended = false;
  bool paused = false;      // the client is behind: nothing is read from the worker
  bool client_watched = false;
  std::size_t address = 0;  // the one being tried
  std::size_t sent = 0;     // of the request, head and body
  bool stale = false;       // the kept connection that it was sent by had been closed
  bool unsendable = false;  // the worker takes no more of it
  std::uint64_t received = 0;
  std::shared_ptr<Journal> journal;  // of the present exchange; null: bytes go on as they come
  std::optional<Reply> reply;
  std::string unsent;  // for the client
  std::size_t unsent_at = 0;
  std::uint64_t bytes_to_client = 0;
  double started_s = -1.0, first_byte_s = -1.0, last_byte_s = -1.0;
  double told_s = -1.0;
  double show_at_s = -1.0;  // when the client gets what is withheld of its reply; below 0: never
  bool heard = false;       // a part of the reply's body came
  std::uint64_t told_events = 0;
  Marks::Place told_at;
  Timers::Deadline deadline;

  bool all_sent() const { return sent == order.head.size() + order.body.size(); }
  bool silent() const { return bytes_to_client == 0; }  // its client has nothing of the body

  // The client has seen nothing, or nothing that needs this worker.
  bool expendable() const {
    const bool by_events = reply.has_value() && reply->by_events();
    return silent() || order.client_fd < 0 || (by_events && written != 0 && journal->fit());
  }
  std::size_t waiting() const { return unsent.size() - unsent_at; }
};

}  // namespace kv::relay
