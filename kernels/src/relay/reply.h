// One reply as its bytes come from a worker: its head, its body's end, its account. No I/O; the
// twin is the middle part of `router/upstream/fallback.py`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "relay/framing.h"
#include "relay/head.h"
#include "relay/journal.h"
#include "relay/meter.h"
#include "relay/terms.h"

namespace kv::relay {

// Lifetime: one exchange. Views that it gives hold until the next `feed`.
class Reply {
 public:
  // `journal`: a stream goes by whole events, in chunks of our own, as far as it is one; or null.
  // `kept_bytes` above 0: there is no client, and the reply is held up to so many bytes.
  Reply(const Limits& limits, bool head_request, const ClientTerms& client,
        Journal* journal = nullptr, std::size_t kept_bytes = 0)
      : limits_(limits),
        client_(client),
        journal_(journal),
        kept_bytes_(kept_bytes),
        head_request_(head_request) {}
  Reply(const Reply&) = delete;
  Reply& operator=(const Reply&) = delete;

  // Takes the next bytes. Throws Broken for what is no reply, or one that cannot be framed.
  void feed(std::string_view data);

  // The worker's connection ended in good form, which ends the body of a reply that `closes`.
  void close();

  bool headed() const { return status_ != 0; }
  int status() const { return status_; }
  bool answers() const { return status_ >= 200 && status_ < 300; }
  bool done() const { return headed() && body_.done(); }
  bool surplus() const { return surplus_; }    // bytes came after its end
  bool reusable() const { return reusable_; }  // as far as its head says
  bool closes() const { return framing_ == Framing::close; }
  bool by_events() const { return by_events_; }
  // The client's reply ends with its connection.
  bool ends_with_connection() const { return closes() && !by_events_; }
  // Why a reply by events goes no further, though its worker's is well framed.
  const Failure& failure() const { return failure_; }
  // A 5xx reply, or one that says busy: another worker may do better.
  bool failed() const { return failed_; }
  bool held() const { return held_; }      // its client gets nothing of it, or there is none
  Fault held_fault() const { return busy_ ? Fault::busy : Fault::status_5xx; }

  std::string_view forward() const { return forward_; }  // of the last `feed`, for the client
  std::size_t body_bytes() const { return body_bytes_; }  // of the worker's, in the last `feed`
  const std::string& head_for_client();
  bool persistent() const { return persistent_; }  // the client's connection outlives this reply
  const std::string& reason() const { return reason_; }
  const Meter& meter() const { return meter_; }

  // Of a held reply: its head as it came, without the empty line, and its body without framing.
  const std::string& held_head() const { return held_head_; }
  const std::string& held_body() const { return held_body_; }

 private:
  std::string_view read_heads(std::string_view data);
  void begin_body(std::string_view text, const ReplyHead& head);
  void read_body(std::string_view data);
  void hold();
  void pass_events();
  void end_events();

  const Limits& limits_;
  const ClientTerms& client_;
  Journal* journal_;
  std::size_t kept_bytes_;
  bool head_request_;
  int status_ = 0;
  Framing framing_ = Framing::none;
  bool reusable_ = false, persistent_ = false, failed_ = false, held_ = false, busy_ = false;
  bool surplus_ = false, by_events_ = false;
  Failure failure_;
  std::size_t heads_bytes_ = 0, body_bytes_ = 0;
  std::string buffer_;  // of the head, until it is complete
  std::string_view forward_;
  std::string head_for_client_, reason_, held_head_, held_body_;
  std::size_t ours_at_ = 0;  // in the client's head, where lines of the router's own stand
  std::string events_;       // framed for the client
  Body body_;
  Body::Payload payload_;
  Meter meter_;
};

}  // namespace kv::relay
