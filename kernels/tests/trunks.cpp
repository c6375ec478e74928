// Drives the hot trunks without Python, for the sanitizers (sanitize.sh builds and runs it;
// `tests/router/core/sessions/test_trunks.py` holds the numbers to the twin's).
//   trunks [N] [SEED]   N random histories; exit 1 where more heads are kept than may be, a trunk
//                       is told that the prompt does not begin with, or a number is none
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "decision/trunks.h"

namespace {

void fail(const char* what, std::uint64_t seed) {
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
  std::exit(1);
}

// A prompt whose blocks are named by the path to them, so that prompts share heads.
std::vector<std::uint64_t> prompt(std::mt19937_64& random) {
  std::vector<std::uint64_t> chain(random() % 60);
  std::uint64_t name = 1;
  for (std::size_t at = 0; at < chain.size(); ++at) {
    if (at % 20 == 0) name = name * 31 + random() % 3;
    chain[at] = name * 1000 + at;
  }
  return chain;
}

void check(const kv::Trunk& trunk, std::uint64_t seed) {
  if (trunk.wanted_copies < 1) fail("a trunk wants no worker", seed);
  for (const double number : {trunk.rate_per_s, trunk.demand, trunk.backlog_s}) {
    if (!(number >= 0.0) || std::isinf(number)) fail("a number is none", seed);
  }
}

void live(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap_s(random() % 2 == 0 ? 100.0 : 0.01);
  const std::size_t heads = 1 + random() % 8;
  kv::Trunks trunks(heads);
  double now_s = 0.0;
  for (int event = 0; event < 200; ++event) {
    now_s += gap_s(random);
    const std::vector<std::uint64_t> chain = prompt(random);
    const auto blocks = static_cast<std::int64_t>(chain.size());
    const std::int64_t shared = blocks == 0 ? 0 : static_cast<std::int64_t>(random()) % blocks;
    if (event % 7 == 0) {
      trunks.pool({.workers = static_cast<std::int64_t>(random() % 64), .answer_s = 0.1}, now_s);
    }
    trunks.arrival(chain, 32, blocks * 32 + 5, std::abs(shared), std::abs(shared), now_s);
    if (const auto found = trunks.of(chain)) {
      check(*found, seed);
      const auto last = static_cast<std::size_t>(found->tokens / 32) - 1;
      if (last >= chain.size() || chain[last] != found->last_hash) {
        fail("a trunk is not the prompt's", seed);
      }
    }
    if (trunks.size() > heads) fail("more heads than may be", seed);
  }
  for (const kv::Trunk& trunk : trunks.table()) check(trunk, seed);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t lives = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (std::uint64_t seed = first; seed < first + lives; ++seed) live(seed);
  std::printf("%llu lives: each trunk told was the prompt's\n",
              static_cast<unsigned long long>(lives));
}
