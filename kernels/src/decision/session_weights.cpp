#include "decision/session_weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kv::sessions {

namespace {

bool idle(const Table& table, std::size_t row) {
  return table.serial[row] > 0 && table.inflight[row] == 0;
}

double away_s(const Table& table, std::size_t row, double now_s) {
  return std::max(now_s - table.idle_s[row], 0.0);
}

// The last place where `edges` is not above `value`; -1: nowhere.
std::ptrdiff_t bin_of(Doubles edges, double value) {
  return std::upper_bound(edges.begin(), edges.end(), value) - edges.begin() - 1;
}

// A straight line between the edges, level beyond them; rounded as numpy's `interp` rounds it.
double away_at(const Hazard& hazard, double idle_s) {
  const auto last = static_cast<std::ptrdiff_t>(hazard.edges_s.size()) - 1;
  const std::ptrdiff_t bin = bin_of(hazard.edges_s, idle_s);
  if (bin < 0) return hazard.away.front();
  if (bin >= last) return hazard.away.back();
  const auto at = static_cast<std::size_t>(bin);
  const double start_s = hazard.edges_s[at];
  if (start_s == idle_s) return hazard.away[at];
  const double slope =
      (hazard.away[at + 1] - hazard.away[at]) / (hazard.edges_s[at + 1] - start_s);
  return slope * (idle_s - start_s) + hazard.away[at];
}

// Until when a return saves more than the memory is worth meanwhile.
double horizon_s(const Table& table, std::size_t row, double speed, double capacity,
                 const Limits& limits) {
  const double cold_s = table.cold_work[row] / speed;
  const double share = std::max(table.private_tokens[row], 1.0) / capacity;
  const double horizon = cold_s / share;
  if (std::isnan(horizon)) return limits.unknown_s;
  if (!std::isinf(horizon)) return horizon;
  return horizon > 0.0 ? limits.forget_s : std::numeric_limits<double>::lowest();
}

// Nine places are kept: exponentials differ in the last one from one library to another.
double rounded(double chance) { return std::nearbyint(chance * 1e9) / 1e9; }

}  // namespace

std::size_t enter_bins(const Table& table, std::size_t used, double now_s, Doubles edges_s,
                       std::vector<std::int64_t>& before, std::vector<std::int64_t>& now) {
  std::size_t count = 0;
  for (std::size_t row = 0; row < used; ++row) {
    if (!idle(table, row)) continue;
    ++count;
    const std::int64_t bin = bin_of(edges_s, away_s(table, row, now_s));
    if (bin > table.bin[row]) {
      before.push_back(table.bin[row]);
      now.push_back(bin);
    }
    table.bin[row] = bin;
  }
  return count;
}

void weigh(const Table& table, std::size_t used, double now_s, const Hazard& hazard,
           Doubles speeds, Doubles capacities, const Limits& limits,
           std::vector<std::int64_t>& unlikely, std::vector<std::int64_t>& over) {
  for (std::size_t row = 0; row < used; ++row) {
    if (!idle(table, row)) continue;
    const double away = away_s(table, row, now_s);
    if (away > limits.forget_s) over.push_back(static_cast<std::int64_t>(row));
    if (table.home[row] < 0) continue;
    const auto slot = static_cast<std::size_t>(table.home[row]);
    const double span_s = horizon_s(table, row, speeds[slot], capacities[slot], limits);
    const double then = away_at(hazard, away + span_s);
    table.weight[row] = rounded(-std::expm1(then - away_at(hazard, away)));
    if (table.weight[row] < limits.least_chance) {
      unlikely.push_back(static_cast<std::int64_t>(row));
    }
  }
}

void sum_up(const Table& table, std::size_t used, std::span<double> private_tokens,
            std::span<double> cold_work) {
  std::fill(private_tokens.begin(), private_tokens.end(), 0.0);
  std::fill(cold_work.begin(), cold_work.end(), 0.0);
  for (std::size_t row = 0; row < used; ++row) {
    if (table.home[row] < 0) continue;
    const auto slot = static_cast<std::size_t>(table.home[row]);
    private_tokens[slot] += table.weight[row] * table.private_tokens[row];
    cold_work[slot] += table.weight[row] * table.cold_work[row];
  }
}

}  // namespace kv::sessions
