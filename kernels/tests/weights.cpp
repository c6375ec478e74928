// Drives the weights of sessions without Python, for the sanitizers (sanitize.sh builds and runs
// it; `tests/router/core/sessions/test_session_weights.py` holds the numbers to numpy's).
//   weights [N] [SEED]   N random tables, each weighed as time goes by; exit 1 where a weight is no
//                        chance, or the sums are not those of the weights
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "decision/session_weights.h"

namespace {

using Counts = std::vector<std::int64_t>;
using Column = std::vector<double>;
constexpr kv::sessions::Limits kLimits{.least_chance = 0.02, .forget_s = 900.0, .unknown_s = 60.0};

// A table of sessions, each column in memory of its own, so that a row beyond one is found.
struct Sessions {
  Sessions(std::mt19937_64& random, std::size_t rows, std::int64_t slots)
      : serial(rows), inflight(rows), home(rows), bin(rows, -1), idle_s(rows), tokens(rows),
        work(rows), weight(rows) {
    std::exponential_distribution<double> away(1.0 / 300.0), size(1e-4);
    for (std::size_t row = 0; row < rows; ++row) {
      serial[row] = static_cast<std::int64_t>(random() % 4);
      inflight[row] = static_cast<std::int64_t>(random() % 2);
      home[row] = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(slots + 1)) - 1;
      idle_s[row] = 1000.0 - away(random);
      tokens[row] = size(random);
      work[row] = size(random);
    }
  }

  kv::sessions::Table table() {
    return {serial, inflight, home, idle_s, tokens, work, bin, weight};
  }

  Counts serial, inflight, home, bin;
  Column idle_s, tokens, work, weight;
};

void fail(const char* what, std::uint64_t seed) {
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
  std::exit(1);
}

void live(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::size_t rows = random() % 200, slots = 1 + random() % 9;
  Sessions sessions(random, rows, static_cast<std::int64_t>(slots));
  const Column edges{0.0, 0.25, 1.0, 8.0, 60.0, 512.0}, away{0.0, -0.1, -0.4, -1.0, -3.0, -3.1};
  Column speeds(slots, 1e4), capacities(slots, 1e5), tokens(slots), work(slots);
  for (double& value : capacities) {
    if (random() % 3 == 0) value = std::numeric_limits<double>::quiet_NaN();
  }
  for (double now_s = 1000.0; now_s < 1100.0; now_s += 30.0) {
    const std::size_t used = random() % (rows + 1);
    Counts before, now, unlikely, over;
    kv::sessions::enter_bins(sessions.table(), used, now_s, edges, before, now);
    if (before.size() != now.size()) fail("bins are lost", seed);
    kv::sessions::weigh(sessions.table(), used, now_s, {edges, away}, speeds, capacities, kLimits,
                        unlikely, over);
    kv::sessions::sum_up(sessions.table(), used, tokens, work);
    double wanted = 0.0, found = 0.0;
    for (std::size_t row = 0; row < used; ++row) {
      if (!(sessions.weight[row] >= 0.0 && sessions.weight[row] <= 1.0)) fail("no chance", seed);
      if (sessions.home[row] >= 0) wanted += sessions.weight[row] * sessions.tokens[row];
    }
    for (const double sum : tokens) found += sum;
    if (std::abs(wanted - found) > 1e-9 * wanted) fail("the sums are others", seed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t tables = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 400;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  for (std::uint64_t seed = first; seed < first + tables; ++seed) live(seed);
  std::printf("%llu tables: each weight is a chance\n", static_cast<unsigned long long>(tables));
  return 0;
}
