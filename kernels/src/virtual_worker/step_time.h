// How long a step takes, in ns: engine/step_time.py in the same order of operations, so that both
// round alike to the last bit. Compile without contraction and without -ffast-math.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kv::engine {

constexpr double kLeastP = 0.25;      // of the soft maximum
constexpr double kMaxStepNs = 1e15;  // eleven days; the longest step there is

struct StepTime {
  double linear_s, pair_s, weights_s, context_s, experts_s, expert_share, overhead_s, seq_s,
      softmax_p;

  // Seconds to read the weights that so many tokens use: all shared ones, the experts visited.
  double read_s(double new_tokens) const {
    const double untouched = std::pow(1.0 - expert_share, new_tokens);
    return weights_s + experts_s * (1.0 - untouched);
  }

  // (left^p + right^p)^(1/p), scaled by the larger so that no power underflows.
  double soft_max(double left, double right) const {
    const double high = left >= right ? left : right;
    const double low = left >= right ? right : left;
    if (high == 0.0) return 0.0;
    return high * std::pow(1.0 + std::pow(low / high, softmax_p), 1.0 / softmax_p);
  }
};

// Prices the steps of one worker; keeps the powers, which change with the batch only.
class StepPrice {
 public:
  StepPrice(const StepTime& time, double speed) : time_(time), speed_(speed) {}

  void set_speed(double speed) { speed_ = speed; }

  // For the steps that follow: everything but the context that decodes read.
  void set_batch(std::int64_t new_tokens, std::int64_t seqs, double attention_pairs) {
    if (new_tokens != new_tokens_) {
      const auto tokens = static_cast<double>(new_tokens);
      compute_s_ = time_.soft_max(time_.read_s(tokens), time_.linear_s * tokens);
      new_tokens_ = new_tokens;
    }
    base_s_ = time_.overhead_s + time_.seq_s * static_cast<double>(seqs) + compute_s_ +
              time_.pair_s * attention_pairs;
  }

  std::int64_t step_ns(std::int64_t decode_ctx_tokens) const {
    return whole_ns(base_s_ + time_.context_s * static_cast<double>(decode_ctx_tokens));
  }

  // What takes `seconds` at speed 1.
  std::int64_t whole_ns(double seconds) const {
    double ns = seconds / speed_ * 1e9;
    if (!(ns < kMaxStepNs)) ns = kMaxStepNs;  // not `>=`: what overflowed may be no number
    // Adding 1.5 * 2^52 leaves no bits for a fraction: half to even, as Python's round.
    constexpr double kWholeOnly = 6755399441055744.0;
    return std::max<std::int64_t>(1, static_cast<std::int64_t>((ns + kWholeOnly) - kWholeOnly));
  }

 private:
  StepTime time_;
  double speed_;
  std::int64_t new_tokens_ = -1;
  double compute_s_ = 0.0;
  double base_s_ = 0.0;
};

}  // namespace kv::engine
