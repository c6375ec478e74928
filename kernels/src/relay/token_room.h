// How many token ids are kept to go on with, of one stream and of all; the twin is
// `router/upstream/migration/journal.py`.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv::relay {

// Lifetime: process. For any thread. The bounds may be changed while streams hold some.
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

}  // namespace kv::relay
