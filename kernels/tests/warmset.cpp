// Drives the default policy's costs without Python, for the sanitizers (sanitize.sh builds and runs
// it; `tests/router/core/placement/test_native_warmset.py` holds the numbers to the policy's own).
//   warmset [N] [SEED]   N random pools, each asked ten times; exit 1 where a cost is no number or
//                        below 0, or somebody warm is shut out
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "decision/warmset.h"

namespace {

using Column = std::vector<double>;
using Counts = std::vector<std::int64_t>;
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Columns of a pool, each in memory of its own, so that a row beyond one is found.
class Pool {
 public:
  Pool(std::mt19937_64& random, std::size_t slots) : random_(random), slots_(slots) {}

  kv::warmset::Columns columns() {
    kv::warmset::Columns shown{};
    const Counts& ids = counts(1'000'000);
    shown.worker_id = ids;
    shown.drained_work = column(1e4);
    shown.charged_work = more(shown.drained_work);
    shown.token_work = more(column(1.0));
    shown.requests = counts(40);
    shown.foreign_running = counts(9);
    shown.foreign_waiting = counts(9);
    shown.waiting_prompt_tokens = counts(100'000);
    shown.report_s = column(100.0);
    shown.context_tokens = column(1e5);
    shown.own_tokens_at_report = column(1e5);
    shown.kv_reported_tokens = column(1e5, true);
    shown.kv_capacity_tokens = column(1e5, true);
    shown.cached_tokens = column(1e5, true);
    shown.prefill_tokens_per_s = column(1e4);
    shown.step_s = column(0.1);
    shown.private_tokens = column(2e5);
    shown.trunk_tokens = column(1e4);
    shown.cold_work = column(1e6);
    shown.unowned_tokens = column(1e4);
    return shown;
  }

 private:
  const Column& column(double most, bool may_lack = false) {
    auto& made = doubles_.emplace_back(std::make_unique<Column>(slots_));
    std::uniform_real_distribution<double> draw(most * 1e-3, most);
    for (double& value : *made) value = may_lack && random_() % 3 == 0 ? kUnknown : draw(random_);
    return *made;
  }

  const Column& more(kv::Doubles than) {
    auto& made = doubles_.emplace_back(std::make_unique<Column>(than.begin(), than.end()));
    for (double& value : *made) value += static_cast<double>(random_() % 20'000);
    return *made;
  }

  const Counts& counts(std::uint64_t most) {
    auto& made = integers_.emplace_back(std::make_unique<Counts>(slots_));
    for (std::int64_t& value : *made) value = static_cast<std::int64_t>(random_() % most);
    return *made;
  }

  std::mt19937_64& random_;
  std::size_t slots_;
  std::vector<std::unique_ptr<Column>> doubles_;
  std::vector<std::unique_ptr<Counts>> integers_;
};

void ask(std::mt19937_64& random, const kv::warmset::Columns& columns, std::uint64_t seed) {
  const std::size_t slots = columns.worker_id.size(), rows = 1 + random() % slots;
  Counts asked(rows), hits(rows);
  const auto prompt = static_cast<std::int64_t>(1 + random() % 30'000);
  const auto trunk = static_cast<std::int64_t>(random() % (static_cast<std::uint64_t>(prompt) + 1));
  for (std::size_t row = 0; row < rows; ++row) {
    asked[row] = static_cast<std::int64_t>(random() % slots);
    hits[row] = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(prompt));
  }
  const std::unique_ptr<bool[]> holds(new bool[slots]);
  for (std::size_t slot = 0; slot < slots; ++slot) holds[slot] = random() % 2 == 0;
  const auto standing = static_cast<kv::warmset::Standing>(random() % 3);
  const kv::warmset::Request request{
      .prompt_tokens = prompt, .trunk_tokens = trunk, .standing = standing,
      .home_id = columns.worker_id[random() % slots],
      .return_chance = static_cast<double>(random() % 11) / 10.0,
      .held_s = static_cast<double>(random() % 30),
      .own_slot = static_cast<std::int64_t>(random() % (slots + 1)) - 1,
      .own_tokens = 500.0, .own_work = 500.0, .holds_trunk = {holds.get(), slots},
      .own_trunk_alone = random() % 2 == 0,
      .hot_trunk_tokens = static_cast<std::int64_t>(random() % 4'000),
      .wanted_copies = static_cast<std::int64_t>(random() % 9),
      .turnover_per_s = 0.1, .cycle_s = static_cast<double>(random() % 20),
      .pair_tokens = random() % 2 == 0 ? 0.0 : 1e-4, .now_s = 100.0,
      .foreign_load_max_age_s = static_cast<double>(random() % 100)};
  Column costs(rows);
  kv::warmset::costs(columns, {1.0, 4.0, 0.1}, request, hits, asked, costs.data());
  for (const double cost : costs) {
    const bool is_warm = standing == kv::warmset::Standing::kWarm;
    if (cost >= 0.0 && !(is_warm && std::isinf(cost))) continue;
    std::fprintf(stderr, "a cost is %g (pool of seed %llu)\n", cost,
                 static_cast<unsigned long long>(seed));
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t pools = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 400;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  for (std::uint64_t seed = first; seed < first + pools; ++seed) {
    std::mt19937_64 random(seed);
    Pool pool(random, 1 + random() % 300);
    const kv::warmset::Columns columns = pool.columns();
    for (int time = 0; time < 10; ++time) ask(random, columns, seed);
  }
  std::printf("%llu pools: each cost is a number\n", static_cast<unsigned long long>(pools));
  return 0;
}
