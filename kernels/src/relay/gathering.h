// When the relay's thread lets small parts of replies gather instead of waking for each. No I/O.
#pragma once

#include <algorithm>
#include <cstddef>

namespace kv::relay {

// To be woken costs more than to pass on an event: where many streams run, each wake-up should
// find several. Lifetime: process.
class Gathering {
 public:
  // `most_s`: the longest that a part is kept waiting; 0: none ever is.
  explicit Gathering(double most_s) : most_s_(most_s) {}

  // A part of a reply that had begun was read.
  void part(std::size_t bytes) {
    ++parts_;
    bulk_ = bulk_ || bytes > kBulkBytes;
  }

  // A turn over what was ready, begun at `now_s`, is over: seconds to wait for commands alone.
  double rest_s(double now_s) {
    const std::size_t parts = parts_;
    const bool bulk = bulk_;
    count(now_s);
    if (parts == 0 || parts >= kEnough || bulk || most_s_ * per_s_ < kLeast) return 0.0;
    return std::min(most_s_, kEnough / per_s_);
  }

 private:
  static constexpr std::size_t kEnough = 8;         // parts by wake-up: its cost is spread by then
  static constexpr double kLeast = 1.5;             // parts to come, or waiting for them is in vain
  static constexpr std::size_t kBulkBytes = 4'096;  // more of a part is no event, it is a download
  static constexpr double kWindowS = 0.02;          // over which they are counted

  void count(double now_s) {
    counted_ += parts_;
    parts_ = 0;
    bulk_ = false;
    const double passed_s = now_s - since_s_;
    if (passed_s < kWindowS) return;
    per_s_ = static_cast<double>(counted_) / passed_s;
    counted_ = 0;
    since_s_ = now_s;
  }

  double most_s_;
  std::size_t parts_ = 0;  // of this turn
  bool bulk_ = false;
  std::size_t counted_ = 0;
  double since_s_ = 0.0;
  double per_s_ = 0.0;
};

}  // namespace kv::relay
