// What is remembered of a stream's first worker, and the bytes its client gets. No I/O; the twin is
// `router/migration/journal.py`, which goes on from here when the worker is lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "relay/chunk.h"
#include "relay/terms.h"

namespace kv::relay {

// How many token ids are kept to go on with, of one stream and of all. For any thread; the bounds
// may be changed while streams hold some. Lifetime: process.
class TokenRoom {
 public:
  TokenRoom(std::int64_t of_stream, std::int64_t of_all)
      : stream_tokens(of_stream), tokens(of_all) {}

  std::atomic<std::int64_t> stream_tokens, tokens;

  std::int64_t taken() const { return taken_; }

  // Keeps `more` tokens of a stream, `of_stream` in all; beyond a bound false, and none.
  bool take(std::int64_t more, std::int64_t of_stream) {
    if (of_stream > stream_tokens) return false;
    if (taken_.fetch_add(more) + more <= tokens) return true;
    taken_.fetch_sub(more);
    return false;
  }

  void give(std::int64_t count) { taken_.fetch_sub(count); }

 private:
  std::atomic<std::int64_t> taken_{0};
};

// How a stream is read. Lifetime: request.
struct JournalTerms {
  std::shared_ptr<TokenRoom> room;
  std::string hidden;           // the value of fields of ids; empty: they are left out
  std::string migratable_line;  // of the client's head where the stream may move, with its CRLF
};

// Events in, the client's bytes out, ids kept. Lifetime: one worker's reply; frees the ids.
class Journal {
 public:
  explicit Journal(std::shared_ptr<const JournalTerms> terms);
  ~Journal() { terms_->room->give(kept_tokens_); }
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // Appends the client's part of the reply's next bytes; stops where `failure` is set.
  void feed(std::string_view payload, std::string& out);

  // Appends what waits, once the worker has ended its reply in good form.
  void flush(std::string& out);

  // The answer is whole, or nobody can say that it is not.
  bool may_end() const { return finished_ || complete_ || !unfit_.empty(); }
  bool fit() const { return unfit_.empty(); }  // another worker could go on

  const JournalTerms& terms() const { return *terms_; }
  const std::vector<std::int32_t>& prompt() const { return prompt_; }
  const std::vector<std::int32_t>& said() const { return said_; }
  std::size_t prompt_tokens() const { return prompt_tokens_; }
  const std::string& prefix() const { return prefix_; }
  bool prefixed() const { return prefixed_; }
  const std::string& unfit() const { return unfit_; }
  bool finished() const { return finished_; }
  bool complete() const { return complete_; }
  bool miscounted() const { return miscounted_; }
  bool opened() const { return opened_; }
  bool usage_sent() const { return usage_sent_; }
  const Failure& failure() const { return failure_; }

  // Leaves the room taken to the caller, who gives it back; the tokens.
  std::int64_t leave_room();

 private:
  void take(std::string_view event, std::string& out);
  void take_choice(std::string_view event, const Chunk& chunk, std::string& out);
  void remember(const std::vector<std::int32_t>* prompt, const Choice& choice);
  bool is_answer(const Chunk& chunk);
  void write(std::string_view event, std::string& out);
  void spoil(const char* why);

  std::shared_ptr<const JournalTerms> terms_;
  std::size_t event_bytes_;  // of the longest event
  std::string buffer_;       // of the event under way
  std::size_t searched_ = 0;
  std::string held_;         // events that wait for text
  std::vector<std::int32_t> prompt_, said_, withheld_;
  std::size_t prompt_tokens_ = 0;
  std::int64_t kept_tokens_ = 0;
  std::string prefix_, unfit_;
  bool prefixed_ = false, finished_ = false, complete_ = false, miscounted_ = false;
  bool opened_ = false, usage_sent_ = false;
  Failure failure_;
};

}  // namespace kv::relay
