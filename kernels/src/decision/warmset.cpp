// The native twin of policies/warmset.py. Constants and functions have the names of that file and
// of policies/work.py, in their order, and give the same results to the last bit (the order of
// additions matters); tests hold them to it. It stays in kernels/, the source folder of CMake:
// policies/ is Python without native code, and is shipped as it is.
#include "decision/warmset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kv::warmset {

namespace {

// policies/warmset.py says what each is for, and where it comes from.
constexpr double kFull = 0.9;           // FULL: share of a worker's memory
constexpr double kRedo = 0.9;           // REDO: share of a turn
constexpr double kGamma = 1.2;          // GAMMA: factor, no unit
constexpr double kReused = 0.1;         // REUSED: chance
constexpr double kWantedMost = 4.0;     // WANTED_MOST: share of a worker's memory
constexpr double kReliefS = 5.0;        // RELIEF_S: seconds
constexpr double kColdWait = 4.0;       // COLD_WAIT: seconds a second of own prefill
constexpr double kColdFull = 1.15;      // COLD_FULL: share of a worker's memory
constexpr double kColdWaitMostS = 20.0; // COLD_WAIT_MOST_S: seconds
constexpr double kIdleWait = 100.0;     // IDLE_WAIT: seconds a second of own prefill
// policies/work.py
constexpr double kQueueLasts = 2.0;     // QUEUE_LASTS: seconds a second of work
// policies/contract.py, `assumed_capacity_tokens`: tokens, where no worker's capacity is known.
constexpr double kAssumedTokens = 1e18;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// NaN wins, as in numpy's maximum and minimum; std::max would let the order decide.
double maximum(double a, double b) { return a >= b || std::isnan(a) ? a : b; }
double minimum(double a, double b) { return a <= b || std::isnan(a) ? a : b; }

// policies/arrays.py: between
double between(double value, double most) { return minimum(maximum(value, 0.0), most); }

// policies/arrays.py: median
double median(std::vector<double> values) {
  const auto rows = static_cast<std::ptrdiff_t>(values.size());
  if (rows == 0) return 0.0;
  if (std::any_of(values.begin(), values.end(), [](double v) { return std::isnan(v); })) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const auto middle = values.begin() + rows / 2;
  std::nth_element(values.begin(), middle, values.end());
  const double below = rows % 2 == 1 ? *middle : *std::max_element(values.begin(), middle);
  return (*middle + below) / 2;
}

// One worker as the formula sees it: columns of `FleetView`, and `Memory` of policies/warmset.py.
struct Row {
  double prefill_tokens_per_s, requests, queued_prefill_tokens, queued_prefill_s;
  double working_set_s;
  double own_s;    // own_prefill_s
  double again_s;  // seconds to compute the request's private tokens
  double wanted_tokens, needed_tokens, size_tokens, redo_token_s;
  bool away;  // the request's session is not at home here
};

// Lifetime: one decision.
class Decision {
 public:
  Decision(const Columns& columns, const Parameters& parameters, const Request& request,
           std::span<const std::int64_t> hits, Slots slots)
      : columns_(columns), parameters_(parameters), request_(request), hits_(hits),
        slots_(slots), private_tokens_(request.prompt_tokens - request.trunk_tokens),
        rows_(slots.size()) {
    assume_capacities();
    for (std::size_t row = 0; row < rows_.size(); ++row) read(row);
    judge_memory();
  }

  // Warmset.costs and Warmset.terms
  void costs(double* costs) const {
    const bool warm = request_.standing == Standing::kWarm;
    const std::vector<char> open = warm ? std::vector<char>(rows_.size(), 1) : is_open();
    const double half_step_s = 0.5 * median_step_s();
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Row& r = rows_[row];
      double cost = r.queued_prefill_s;
      cost += r.own_s - trunk_share_s(row);
      cost += memory_wait_s(row);
      cost += delay_to_others_s(r);
      cost += running_s(r, half_step_s);
      if (warm) {
        costs[row] = place_warm(r, cost);
      } else {
        costs[row] = open[row] ? place_new(row, cost) : kInfinite;
      }
    }
  }

 private:
  // Warmset._running_s
  double running_s(const Row& r, double half_step_s) const {
    return parameters_.running * r.requests * (r.own_s + half_step_s);
  }

  // Warmset._place_warm: the whole cost, of which `cost` is what comes before `pushed_out_s`.
  double place_warm(const Row& r, double cost) const {
    cost += pushed_out_s(r) * static_cast<double>(r.away);
    const double stay = std::pow(parameters_.stay, request_.return_chance);
    const double dearer = static_cast<double>(r.away && caches_last_) * (stay - 1.0);
    return cost + dearer * cost;
  }

  // Warmset._place_new: the whole cost, of which `cost` is what comes before `pushed_out_s`.
  double place_new(std::size_t row, double cost) const {
    const Row& r = rows_[row];
    const double chance = static_cast<double>(caches_last_) * request_.return_chance;
    const double wanted_share = minimum(r.needed_tokens / r.size_tokens, kWantedMost);
    const auto own_tokens = static_cast<double>(private_tokens_);
    const double cached = std::fmax(columns_.cached_tokens[slot(row)], 0.0);
    const double evicted_tokens = between(cached + own_tokens - r.size_tokens, own_tokens);
    cost += pushed_out_s(r);
    cost += r.again_s * chance * wanted_share;
    cost += evicted_tokens * (kReused / r.prefill_tokens_per_s);
    return cost;
  }

  // Warmset._is_open
  std::vector<char> is_open() const {
    std::vector<char> open(rows_.size(), 1);
    if (!holding_pays_) return open;
    bool any = false;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Row& r = rows_[row];
      const bool fits = over(r) <= 0.0;
      const bool nobody_home = r.wanted_tokens == 0.0;
      const bool needs_no_cache = r.working_set_s + r.again_s <= kRedo * request_.cycle_s;
      const bool idle_for_long =
          r.requests == 0.0 && request_.held_s > kIdleWait * r.again_s;
      open[row] = fits || nobody_home || needs_no_cache || idle_for_long;
      any = any || open[row];
    }
    if (request_.held_s > kReliefS && !any) relief(open);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const bool is_there = 2 * (hits_[row] - request_.trunk_tokens) > private_tokens_;
      open[row] = open[row] || is_there || private_tokens_ <= 0;  // `over_tokens` would be 0
    }
    return open;
  }

  // Warmset._relief
  void relief(std::vector<char>& open) const {
    double least_over = kInfinite, least_own_tokens = kInfinite, least_again_s = kInfinite;
    bool never_fits = true;
    for (const Row& r : rows_) {
      const double own_tokens = r.needed_tokens - r.wanted_tokens;
      least_over = minimum(least_over, over(r));
      least_own_tokens = minimum(least_own_tokens, own_tokens);
      least_again_s = minimum(least_again_s, r.again_s);
      never_fits = never_fits && own_tokens > parameters_.gate * r.size_tokens;
    }
    const double pool_tokens =
        sum([](const Row& r) { return r.wanted_tokens; }) + least_own_tokens;
    const double pool_size_tokens = sum([](const Row& r) { return r.size_tokens; });
    const bool pool_has_room = pool_tokens <= kFull * pool_size_tokens;
    double most = kInfinite;
    if (!(never_fits || pool_has_room)) {
      const bool cold = request_.standing == Standing::kCold;
      if (!cold || request_.held_s <= kColdWait * least_again_s) return;
      if (request_.held_s < kColdWaitMostS) most = kColdFull;
    }
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Row& r = rows_[row];
      open[row] = over(r) <= least_over && r.needed_tokens <= most * r.size_tokens;
    }
  }

  // Tokens by which sessions would want more than the gate lets them.
  double over(const Row& r) const { return r.needed_tokens - parameters_.gate * r.size_tokens; }

  // _memory, of one worker; and the columns that the rest of the formula reads.
  void read(std::size_t row) {
    Row& r = rows_[row];
    const std::size_t at = slot(row);
    const std::int64_t hit = hits_[row];
    const bool own = slots_[row] == request_.own_slot;
    r.prefill_tokens_per_s = columns_.prefill_tokens_per_s[at];
    r.requests = static_cast<double>(requests(at));
    const double queued = columns_.charged_work[at] - columns_.drained_work[at];
    r.queued_prefill_tokens =
        request_.pair_tokens == 0.0 ? queued : queued / columns_.token_work[at];
    r.queued_prefill_s = queued / r.prefill_tokens_per_s;
    r.own_s = prefill_s(r, static_cast<double>(request_.prompt_tokens - hit),
                        static_cast<double>(hit));
    r.again_s = prefill_s(r, static_cast<double>(private_tokens_),
                          static_cast<double>(request_.trunk_tokens));
    r.wanted_tokens = columns_.private_tokens[at] + columns_.trunk_tokens[at];
    r.wanted_tokens += columns_.unowned_tokens[at];
    if (own) r.wanted_tokens -= request_.own_tokens;
    r.wanted_tokens = maximum(r.wanted_tokens, 0.0);
    r.working_set_s =
        (columns_.cold_work[at] + columns_.unowned_tokens[at]) / r.prefill_tokens_per_s;
    if (own) r.working_set_s -= request_.own_work / r.prefill_tokens_per_s;
    r.working_set_s = maximum(r.working_set_s, 0.0);
    const bool holds_trunk = request_.holds_trunk[at] && !(own && request_.own_trunk_alone);
    const bool lacks_trunk = hit < std::min(request_.trunk_tokens, request_.prompt_tokens - 1);
    const bool needs_trunk = !holds_trunk && lacks_trunk;
    r.needed_tokens = r.wanted_tokens + static_cast<double>(private_tokens_);
    r.needed_tokens += static_cast<double>(needs_trunk ? request_.trunk_tokens : 0);
    r.redo_token_s = r.working_set_s / maximum(r.wanted_tokens, 1.0);
    r.away = columns_.worker_id[at] != request_.home_id;
  }

  // _memory, of the pool
  void judge_memory() {
    const double workers = static_cast<double>(rows_.size());
    const double redo_s = sum([](const Row& r) { return r.redo_token_s * r.size_tokens; });
    const double saved_s = kGamma * kFull * redo_s / workers;
    holding_pays_ = saved_s >= request_.cycle_s && request_.cycle_s > 0.0;
    caches_last_ = saved_s >= busy_share() * request_.cycle_s;
  }

  // _pushed_out_s
  double pushed_out_s(const Row& r) const {
    const double most =
        static_cast<double>(private_tokens_) * static_cast<double>(caches_last_);
    return between(r.needed_tokens - kFull * r.size_tokens, most) * r.redo_token_s;
  }

  // policies/work.py: delay_to_others_s
  double delay_to_others_s(const Row& r) const {
    const double arrivals_per_s = r.requests * request_.turnover_per_s;
    return kQueueLasts * arrivals_per_s * r.own_s * (r.queued_prefill_s + 0.5 * r.own_s);
  }

  // policies/work.py: trunk_share_s
  double trunk_share_s(std::size_t row) const {
    if (!copies_missing_ || hits_[row] >= request_.hot_trunk_tokens) return 0.0;
    const Row& r = rows_[row];
    const auto trunk_tokens = static_cast<double>(request_.hot_trunk_tokens);
    return minimum(prefill_s(r, trunk_tokens, 0.0), r.own_s);
  }

  // policies/work.py: memory_wait_s
  double memory_wait_s(std::size_t row) const {
    const Row& r = rows_[row];
    const std::size_t at = slot(row);
    const double own = columns_.context_tokens[at] + r.queued_prefill_tokens;
    const double since_report = maximum(own - columns_.own_tokens_at_report[at], 0.0);
    const double reported = columns_.kv_reported_tokens[at] + since_report;
    double unfinished = columns_.context_tokens[at] +
                        static_cast<double>(columns_.waiting_prompt_tokens[at]);
    unfinished -= (r.requests - 1.0) * static_cast<double>(request_.trunk_tokens);
    const double used = maximum(std::fmax(reported, 0.0), unfinished);
    const double lacking = used + static_cast<double>(private_tokens_) - r.size_tokens;
    const bool waits = lacking > 0.0 && r.requests > 0.0 && used > 0.0;
    if (!waits || !(request_.turnover_per_s > 0.0)) return 0.0;
    const double answers = minimum(std::ceil(lacking * r.requests / used), r.requests);
    return answers / (r.requests * request_.turnover_per_s);
  }

  // policies/work.py: busy_share
  double busy_share() const {
    const auto busy = std::count_if(rows_.begin(), rows_.end(), [](const Row& r) {
      return r.queued_prefill_tokens != 0.0;
    });
    return static_cast<double>(busy) / static_cast<double>(rows_.size());
  }

  // FleetView.prefill_s: seconds for `tokens` after `cached` ones.
  double prefill_s(const Row& r, double tokens, double cached) const {
    const double work = tokens * (1.0 + request_.pair_tokens * (cached + tokens * 0.5));
    return work / r.prefill_tokens_per_s;
  }

  // FleetView.requests: own, and those of other clients where they were reported lately.
  std::int64_t requests(std::size_t at) const {
    const std::int64_t own = columns_.requests[at];
    if (!(request_.now_s - columns_.report_s[at] <= request_.foreign_load_max_age_s)) return own;
    return own + columns_.foreign_running[at] + columns_.foreign_waiting[at];
  }

  // FleetView.assumed_capacity_tokens
  void assume_capacities() {
    std::vector<double> known;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const double capacity = columns_.kv_capacity_tokens[slot(row)];
      rows_[row].size_tokens = capacity;
      if (!std::isnan(capacity)) known.push_back(capacity);
    }
    if (known.size() == rows_.size()) return;
    const double assumed = known.empty() ? kAssumedTokens : median(std::move(known));
    for (Row& r : rows_) {
      if (std::isnan(r.size_tokens)) r.size_tokens = assumed;
    }
  }

  // FleetView.copies_missing > 0: fewer workers hold the hot trunk than should.
  bool copies_missing() const {
    const auto rows = static_cast<std::int64_t>(hits_.size());
    const auto copies = std::count_if(hits_.begin(), hits_.end(), [this](std::int64_t hit) {
      return hit >= request_.hot_trunk_tokens;
    });
    return copies < std::min(request_.wanted_copies, rows);
  }

  double median_step_s() const {
    std::vector<double> steps_s(rows_.size());
    for (std::size_t row = 0; row < rows_.size(); ++row) steps_s[row] = columns_.step_s[slot(row)];
    return median(std::move(steps_s));
  }

  // Over all rows, rounded as numpy does.
  template <class Of>
  double sum(Of of) const {
    std::vector<double> values(rows_.size());
    std::transform(rows_.begin(), rows_.end(), values.begin(), of);
    return pairwise_sum(values);
  }

  std::size_t slot(std::size_t row) const { return static_cast<std::size_t>(slots_[row]); }

  const Columns& columns_;
  const Parameters& parameters_;
  const Request& request_;
  std::span<const std::int64_t> hits_;
  Slots slots_;
  std::int64_t private_tokens_;
  std::vector<Row> rows_;
  bool holding_pays_ = false, caches_last_ = false;  // as in `Memory` of policies/warmset.py
  bool copies_missing_ = copies_missing();
};

}  // namespace

void costs(const Columns& columns, const Parameters& parameters, const Request& request,
           std::span<const std::int64_t> hits, Slots slots, double* costs) {
  Decision(columns, parameters, request, hits, slots).costs(costs);
}

}  // namespace kv::warmset
