#include "decision/warmset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kv::warmset {

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// As in policies/warmset.py and policies/work.py, where each has its reason.
constexpr double kFull = 0.9, kRedo = 0.9, kGamma = 1.2, kReused = 0.1, kReliefS = 5.0;
constexpr double kBegun = 4.0, kBeyond = 1.15, kAtMostS = 20.0, kIdle = 100.0, kBusy = 2.0;
constexpr double kAssumedTokens = 1e18;  // a capacity, where no worker told one

// NaN wins, as in numpy's maximum and minimum; std::max would let the order decide.
double maximum(double a, double b) { return a >= b || std::isnan(a) ? a : b; }
double minimum(double a, double b) { return a <= b || std::isnan(a) ? a : b; }
double between(double value, double most) { return minimum(maximum(value, 0.0), most); }

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

// One worker as the formula sees it.
struct Row {
  double rate, requests, queue_s, own_s, wanted, redo_s, after, size, token_s;
  double queued_tokens;
  bool away;
};

// Lifetime: one decision.
class Decision {
 public:
  Decision(const Columns& columns, const Parameters& parameters, const Request& request,
           std::span<const std::int64_t> hits, Slots slots)
      : columns_(columns), parameters_(parameters), request_(request), hits_(hits),
        slots_(slots), private_(request.prompt_tokens - request.trunk_tokens),
        rows_(slots.size()) {
    assume_capacities();
    for (std::size_t row = 0; row < rows_.size(); ++row) see(row);
    const double workers = static_cast<double>(rows_.size());
    const double saved_s = kGamma * kFull * sum([](const Row& r) { return r.token_s * r.size; }) /
                           workers;
    const auto busy = std::count_if(rows_.begin(), rows_.end(),
                                    [](const Row& r) { return r.queued_tokens != 0.0; });
    pays_ = saved_s >= request_.cycle_s && request_.cycle_s > 0.0;
    lasts_ = saved_s >= static_cast<double>(busy) / workers * request_.cycle_s;
  }

  void costs(double* costs) const {
    const bool warm = request_.standing == Standing::kWarm;
    const std::vector<char> open = warm || !pays_ ? std::vector<char>(rows_.size(), 1) : opened();
    const double step_s = 0.5 * median_step_s();
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Row& r = rows_[row];
      const double most = static_cast<double>(private_) * static_cast<double>(lasts_);
      double pushed_out_s = between(r.after - kFull * r.size, most) * r.token_s;
      if (warm) pushed_out_s *= static_cast<double>(r.away);
      double cost = r.queue_s;
      cost += r.own_s - invested_s(row);
      cost += room_s(row);
      cost += later_s(r);
      cost += parameters_.running * r.requests * (r.own_s + step_s);
      cost += pushed_out_s;
      if (warm) {
        costs[row] = cost + stay_s(r, cost);
      } else {
        costs[row] = open[row] ? cost + place_s(r) + evicted_s(row) : kInfinite;
      }
    }
  }

 private:
  std::size_t slot(std::size_t row) const { return static_cast<std::size_t>(slots_[row]); }

  // Seconds for `tokens` after `cached` ones.
  double prefill_s(double tokens, double cached, double rate) const {
    return tokens * (1.0 + request_.pair_tokens * (cached + tokens * 0.5)) / rate;
  }

  // Where a capacity is unknown, the others' median.
  void assume_capacities() {
    std::vector<double> told;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const double capacity = columns_.kv_capacity_tokens[slot(row)];
      rows_[row].size = capacity;
      if (!std::isnan(capacity)) told.push_back(capacity);
    }
    if (told.size() == rows_.size()) return;
    const double assumed = told.empty() ? kAssumedTokens : median(std::move(told));
    for (Row& r : rows_) {
      if (std::isnan(r.size)) r.size = assumed;
    }
  }

  void see(std::size_t row) {
    Row& r = rows_[row];
    const std::size_t at = slot(row);
    const std::int64_t hit = hits_[row];
    const bool own = slots_[row] == request_.own_slot;
    r.rate = columns_.prefill_tokens_per_s[at];
    std::int64_t requests = columns_.requests[at];
    if (request_.now_s - columns_.report_s[at] <= request_.believed_s) {
      requests += columns_.foreign_running[at] + columns_.foreign_waiting[at];
    }
    r.requests = static_cast<double>(requests);
    const double queued = columns_.charged_work[at] - columns_.drained_work[at];
    r.queued_tokens = request_.pair_tokens == 0.0 ? queued : queued / columns_.token_work[at];
    r.queue_s = queued / r.rate;
    r.own_s = prefill_s(static_cast<double>(request_.prompt_tokens - hit),
                        static_cast<double>(hit), r.rate);
    r.wanted = columns_.private_tokens[at] + columns_.trunk_tokens[at];
    r.wanted += columns_.unowned_tokens[at];
    if (own) r.wanted -= request_.own_tokens;
    r.wanted = maximum(r.wanted, 0.0);
    r.redo_s = (columns_.cold_work[at] + columns_.unowned_tokens[at]) / r.rate;
    if (own) r.redo_s -= request_.own_work / r.rate;
    r.redo_s = maximum(r.redo_s, 0.0);
    const bool holds = request_.holds_trunk[at] && !(own && request_.own_trunk_alone);
    const bool lacks = hit < std::min(request_.trunk_tokens, request_.prompt_tokens - 1);
    r.after = r.wanted + static_cast<double>(private_);
    r.after += static_cast<double>(!holds && lacks ? request_.trunk_tokens : 0);
    r.token_s = r.redo_s / maximum(r.wanted, 1.0);
    r.away = columns_.worker_id[at] != request_.home_id;
  }

  template <class Of>
  double sum(Of of) const {
    std::vector<double> values(rows_.size());
    std::transform(rows_.begin(), rows_.end(), values.begin(), of);
    return pairwise_sum(values);
  }

  double median_step_s() const {
    std::vector<double> steps_s(rows_.size());
    for (std::size_t row = 0; row < rows_.size(); ++row) steps_s[row] = columns_.step_s[slot(row)];
    return median(std::move(steps_s));
  }

  // Whether fewer workers hold the hot trunk than should, of as many as there are.
  bool lacks_copies() const {
    const auto rows = static_cast<std::int64_t>(hits_.size());
    const auto copies = std::count_if(hits_.begin(), hits_.end(), [this](std::int64_t hit) {
      return hit >= request_.hot_trunk_tokens;
    });
    return copies < std::min(request_.wanted_copies, rows);
  }

  double invested_s(std::size_t row) const {
    if (!lacks_copies_ || hits_[row] >= request_.hot_trunk_tokens) return 0.0;
    const Row& r = rows_[row];
    const auto trunk = static_cast<double>(request_.hot_trunk_tokens);
    return minimum(prefill_s(trunk, 0.0, r.rate), r.own_s);
  }

  double room_s(std::size_t row) const {
    const Row& r = rows_[row];
    const std::size_t at = slot(row);
    const double own = columns_.context_tokens[at] + r.queued_tokens;
    const double since_report = maximum(own - columns_.own_tokens_at_report[at], 0.0);
    const double used = std::fmax(columns_.kv_reported_tokens[at] + since_report, 0.0);
    const double over = used + static_cast<double>(request_.prompt_tokens) -
                        static_cast<double>(hits_[row]) - r.size;
    const double freed_per_s = used * request_.turnover_per_s;
    return over > 0.0 && freed_per_s > 0.0 ? over / freed_per_s : 0.0;
  }

  double later_s(const Row& r) const {
    const double rate_per_s = r.requests * request_.turnover_per_s;
    return kBusy * rate_per_s * r.own_s * (r.queue_s + 0.5 * r.own_s);
  }

  // What a warm session pays away from home.
  double stay_s(const Row& r, double cost) const {
    const double dearer = std::pow(parameters_.stay, request_.return_chance) - 1.0;
    return static_cast<double>(r.away && lasts_) * dearer * cost;
  }

  double again_s(const Row& r) const {
    return prefill_s(static_cast<double>(private_), static_cast<double>(request_.trunk_tokens),
                     r.rate);
  }

  // What a session's cache takes to compute, by the chance that it is wanted again.
  double place_s(const Row& r) const {
    const double chance = static_cast<double>(lasts_) * request_.return_chance;
    return again_s(r) * chance * minimum(r.after / r.size, 4.0);
  }

  double evicted_s(std::size_t row) const {
    const Row& r = rows_[row];
    const auto own = static_cast<double>(private_);
    const double cached = std::fmax(columns_.cached_tokens[slot(row)], 0.0);
    return between(cached + own - r.size, own) * (kReused / r.rate);
  }

  // Where a session that is not at home may start.
  std::vector<char> opened() const {
    std::vector<char> fits(rows_.size());
    double least_over = kInfinite, least_need = kInfinite, least_again_s = kInfinite;
    bool any = false, none_ever = true;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Row& r = rows_[row];
      const double over = r.after - parameters_.gate * r.size, need = r.after - r.wanted;
      fits[row] = over <= 0.0 || r.wanted == 0.0 ||
                  r.redo_s + again_s(r) <= kRedo * request_.cycle_s ||
                  (r.requests == 0.0 && request_.held_s > kIdle * again_s(r));
      least_over = minimum(least_over, over);
      least_need = minimum(least_need, need);
      least_again_s = minimum(least_again_s, again_s(r));
      none_ever = none_ever && need > parameters_.gate * r.size;
      any = any || fits[row];
    }
    if (request_.held_s > kReliefS && !any) {
      relieve(fits, least_over, least_need, least_again_s, none_ever);
    }
    const auto own = static_cast<double>(private_);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const bool there = 2 * (hits_[row] - request_.trunk_tokens) > private_;
      fits[row] = fits[row] || there || !(own > 0.0);
    }
    return fits;
  }

  // Who has waited for long may go where it fits least badly.
  void relieve(std::vector<char>& fits, double least_over, double least_need, double least_again_s,
               bool none_ever) const {
    const double wanted = sum([](const Row& r) { return r.wanted; });
    const double size = sum([](const Row& r) { return r.size; });
    double most = kInfinite;
    if (!(wanted + least_need <= kFull * size || none_ever)) {
      const bool cold = request_.standing == Standing::kCold;
      if (!cold || !(request_.held_s > kBegun * least_again_s)) return;
      if (request_.held_s < kAtMostS) most = kBeyond;
    }
    for (std::size_t row = 0; row < rows_.size(); ++row) {
      const Row& r = rows_[row];
      fits[row] = r.after - parameters_.gate * r.size <= least_over && r.after <= most * r.size;
    }
  }

  const Columns& columns_;
  const Parameters& parameters_;
  const Request& request_;
  std::span<const std::int64_t> hits_;
  Slots slots_;
  std::int64_t private_;
  std::vector<Row> rows_;
  bool pays_ = false, lasts_ = false;
  bool lacks_copies_ = lacks_copies();
};

}  // namespace

void costs(const Columns& columns, const Parameters& parameters, const Request& request,
           std::span<const std::int64_t> hits, Slots slots, double* costs) {
  Decision(columns, parameters, request, hits, slots).costs(costs);
}

}  // namespace kv::warmset
