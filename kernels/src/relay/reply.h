// One reply as its bytes come from a worker: its head, its body's end, its account. No I/O; the
// twin is the middle part of `router/upstream/fallback.py`.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "answer/judge.h"
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
  // `due`: what its client asked for; what is no such answer is held as a 5xx reply is.
  Reply(const Limits& limits, bool head_request, const ClientTerms& client,
        Journal* journal = nullptr, std::size_t kept_bytes = 0, answer::Due due = {})
      : limits_(limits),
        client_(client),
        journal_(journal),
        kept_bytes_(kept_bytes),
        due_(due),
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
  bool failed() const { return failed_; }  // a reply for which another worker may do better
  bool held() const { return held_; }      // its client gets nothing of it, or there is none
  Failure held_failure() const;

  // Nobody can say yet whether it is an answer: its client gets it once it is, or after `show`.
  bool withholds() const { return withholds_; }
  bool pings() const { return judge_.pings(); }  // its client waits for what is withheld
  void show();
  bool begun() const { return judge_.verdict() == answer::Judge::Verdict::answer; }
  bool refuses() const { return judge_.refuses(); }
  // Why a reply that its client has got whole is no answer, or did not end as one; "" where it is.
  const char* flaw() const;

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
  void judge(std::string_view data);
  void pass(std::string_view data);
  void keep(std::string_view data);
  void pass_events();
  void end_events();

  const Limits& limits_;
  const ClientTerms& client_;
  Journal* journal_;
  std::size_t kept_bytes_;
  answer::Due due_;
  answer::Judge judge_;
  bool head_request_;
  int status_ = 0;
  Framing framing_ = Framing::none;
  bool reusable_ = false, persistent_ = false, failed_ = false, held_ = false, busy_ = false;
  bool withholds_ = false, event_stream_ = false;
  bool denies_ = false;  // held so that Python can look whether it is about the model
  bool surplus_ = false, by_events_ = false;
  Failure failure_;
  std::size_t heads_bytes_ = 0, body_bytes_ = 0;
  std::string buffer_;  // of the head, until it is complete
  std::string_view forward_;
  std::string head_for_client_, reason_, held_head_, held_body_;
  std::string withheld_, shown_;  // as they came, where `held_body_` has no framing
  std::string denial_;  // as it came, while `denies_`
  std::size_t ours_at_ = 0;  // in the client's head, where lines of the router's own stand
  std::string events_;       // framed for the client
  Body body_;
  Body::Payload payload_;
  Meter meter_;
};

}  // namespace kv::relay
