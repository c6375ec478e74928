// Hot trunks: prefixes that so many sessions share that one worker cannot serve them all.
//
// The heads of prompts that weigh most are kept by Space-Saving (Metwally, Agrawal, El Abbadi,
// "Efficient Computation of Frequent and Top-k Elements in Data Streams", 2005): a new head takes
// the lightest one's row, with its count as the error. Counts fade exponentially.
// `tests/oracles/trunks.py` is the same in plain Python, equal to the last bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kv {

// A head of prompts, as it stands at the last time told.
struct Trunk {
  std::uint64_t last_hash;  // chain hash of its last block
  std::int64_t tokens;
  double rate_per_s;  // arrivals that begin with it; a lower bound
  double share;       // of all arrivals, 0..1
  double demand;      // seconds of work they bring per second, the trunk itself not counted
  double backlog_s;   // seconds of work that its copies have not got done
  std::int64_t wanted_copies;  // workers that should hold it, at least 1
};

// What the pool can do, by its typical worker.
struct PoolPace {
  std::int64_t workers = std::int64_t{1} << 30;
  double prefill_tokens_per_s = 15'000.0;
  double answer_s = 0.0;  // worker seconds that the tokens of one answer take
  double capacity_tokens = std::numeric_limits<double>::infinity();  // of all workers together
};

// The heads that weigh most, `heads` at most. Lifetime: process. Not thread-safe. Time comes with
// each call and never goes back.
class Trunks {
 public:
  explicit Trunks(std::size_t heads) : most_(heads) { heads_.reserve(heads); }

  // What the workers can do now: told with each arrival, and on ticks between them.
  void pool(const PoolPace& pace, double now_s);

  // A request came in. `shared_blocks`: leading blocks that other sessions use, too, at most the
  // chain's; `known_blocks`: those that any prompt before it had, so nobody need compute them
  // again.
  void arrival(std::span<const std::uint64_t> chain, std::int64_t block_size,
               std::int64_t prompt_tokens, std::int64_t shared_blocks, std::int64_t known_blocks,
               double now_s);

  // The trunk that a prompt begins with: the longest that wants copies, else the longest.
  std::optional<Trunk> of(std::span<const std::uint64_t> chain);

  // All heads kept, the greatest demand first.
  std::vector<Trunk> table();

  std::size_t size() const { return heads_.size(); }
  std::uint64_t replaced() const { return replaced_; }

 private:
  // Counts grow with time instead of fading: divided by `scaled` they are as of now.
  struct Head {
    std::uint64_t last_hash = 0;
    std::size_t last_at = 0;  // where in a chain that hash stands
    std::int64_t tokens = 0;
    double count = 0.0;
    double error = 0.0;  // what of the count may be another head's that left
    double work_s = 0.0;
    double backlog_s = 0.0;  // as of `drained_at_s`
    double drained_at_s = 0.0;
  };

  std::vector<std::size_t> begun_with(std::span<const std::uint64_t> chain) const;
  std::size_t enter(std::uint64_t last_hash, std::size_t blocks, std::int64_t tokens,
                    double now_s);
  void ends_at(std::size_t place, std::int64_t more);
  Trunk trunk(const Head& head, double scale) const;
  std::int64_t wanted(std::int64_t tokens, double recent, double demand, double backlog_s) const;
  double backlog(const Head& head, double scale, double now_s) const;
  double scaled(double now_s);

  std::size_t most_;
  std::vector<Head> heads_;
  std::unordered_map<std::uint64_t, std::size_t> row_;  // by the hash, which stands for all before
  std::vector<std::pair<std::size_t, std::int64_t>> ends_;  // (place, heads that end there)
  PoolPace pace_;
  double arrivals_ = 0.0;
  std::optional<double> since_s_;  // when an arrival counted 1
  double now_s_ = 0.0;             // the last time told
  std::uint64_t replaced_ = 0;     // heads that gave way to another
};

}  // namespace kv
