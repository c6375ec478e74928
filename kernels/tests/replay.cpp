// Drives the C++ core without Python, for the sanitizers (sanitize.sh builds and runs it).
//   replay histories [N] [SEED]   N random histories against a std::map; exit 1 on a difference
//   replay hashes                 XXH3-64 of the first n pattern bytes, n = 0..2100, one a line
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/chain.h"
#include "index/prefix_index.h"

namespace {

using Chain = std::vector<std::uint64_t>;

[[noreturn]] void fail(const std::string& what, std::uint64_t seed, int step) {
  std::fprintf(stderr, "%s (history of seed %llu, step %d)\n", what.c_str(),
               static_cast<unsigned long long>(seed), step);
  std::exit(1);
}

// What the index must say while it is below its bound.
class Model {
 public:
  explicit Model(std::int64_t workers) : workers_(workers) {}

  std::size_t store(std::int64_t worker, const Chain& chain) {
    std::size_t fresh = 0;
    for (const auto hash : chain) fresh += holders_[hash].insert(worker).second ? 1U : 0U;
    return fresh;
  }

  std::size_t remove(std::int64_t worker, const Chain& chain) {
    std::size_t gone = 0;
    for (const auto hash : chain) {
      const auto found = holders_.find(hash);
      if (found == holders_.end()) continue;
      gone += found->second.erase(worker);
      if (found->second.empty()) holders_.erase(found);
    }
    return gone;
  }

  std::size_t clear_worker(std::int64_t worker) {
    Chain held;
    for (const auto& [hash, holders] : holders_) {
      if (holders.contains(worker)) held.push_back(hash);
    }
    return remove(worker, held);
  }

  std::vector<std::int32_t> longest_prefix(const Chain& chain) const {
    std::vector<std::int32_t> hits(static_cast<std::size_t>(workers_), 0);
    for (std::int64_t worker = 0; worker < workers_; ++worker) {
      for (const auto hash : chain) {
        const auto found = holders_.find(hash);
        if (found == holders_.end() || !found->second.contains(worker)) break;
        ++hits[static_cast<std::size_t>(worker)];
      }
    }
    return hits;
  }

  std::size_t size() const { return holders_.size(); }

 private:
  std::int64_t workers_;
  std::map<std::uint64_t, std::set<std::int64_t>> holders_;
};

std::vector<std::int32_t> hits_of(kv::PrefixIndex& index, const Chain& chain) {
  // On the heap and of the exact size, so that a write past the end is seen.
  std::vector<std::int32_t> hits(index.workers());
  index.longest_prefix(chain, hits.data());
  return hits;
}

// A random history. `bounded`: the bound is below the number of distinct blocks; then the index
// may forget, but must never claim a block that is not held, nor grow past the bound.
void replay(std::uint64_t seed, bool bounded) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint64_t end) { return random() % end; };
  const auto workers = static_cast<std::int64_t>(1 + below(below(2) == 0 ? 5 : 200));
  const std::uint64_t universe = 1 + below(400);
  const auto bound = static_cast<std::int64_t>(bounded ? 1 + below(universe) : universe);
  kv::PrefixIndex index(workers, bound);
  Model model(workers);
  // Multiples of the inverse of the table's multiplier all want the first slots: long clusters.
  const bool clustered = below(2) == 0;
  const auto block = [&] { return clustered ? below(universe) * 0xF1DE83E19937733DULL
                                            : below(universe) - 1; };
  for (int step = 0; step < 120; ++step) {
    Chain chain(below(60));
    std::generate(chain.begin(), chain.end(), block);
    const auto worker = static_cast<std::int64_t>(below(static_cast<std::uint64_t>(workers)));
    std::size_t got = 0;
    std::size_t wanted = 0;
    switch (below(8)) {
      case 0: got = index.clear_worker(worker), wanted = model.clear_worker(worker); break;
      case 1:
      case 2: got = index.remove(worker, chain), wanted = model.remove(worker, chain); break;
      default: got = index.store(worker, chain), wanted = model.store(worker, chain);
    }
    const auto hits = hits_of(index, chain);
    const auto most = model.longest_prefix(chain);
    if (bounded) {
      for (std::size_t i = 0; i < hits.size(); ++i) {
        if (hits[i] > most[i]) fail("claimed a block nobody holds", seed, step);
      }
      if (index.size() > index.max_entries()) fail("grew past the bound", seed, step);
    } else {
      if (got != wanted) fail("wrong count", seed, step);
      if (hits != most) fail("wrong hits", seed, step);
      if (index.size() != model.size()) fail("wrong size", seed, step);
      if (index.evicted() != 0) fail("evicted below the bound", seed, step);
    }
  }
}

void print_hashes() {
  std::vector<std::uint8_t> pattern(2100);
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    pattern[i] = static_cast<std::uint8_t>((i * i + 7 * i) >> 3);
  }
  for (std::size_t size = 0; size <= pattern.size(); ++size) {
    // A copy of the exact size, so that a read past the end is seen.
    const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[size]);
    std::copy_n(pattern.begin(), size, exact.get());
    std::printf("%zu %llu\n", size,
                static_cast<unsigned long long>(kv::hash_bytes(exact.get(), size)));
  }
}

// Every block size up to 600 on a token array of the exact size: reads past it are seen.
void hash_chains() {
  for (std::size_t block_size = 1; block_size <= 600; ++block_size) {
    const std::vector<std::int32_t> tokens(3 * block_size, static_cast<std::int32_t>(block_size));
    Chain chain(3);
    kv::chain_hashes(tokens.data(), block_size, chain.size(), ~std::uint64_t{0}, chain.data());
    Chain rest(2);
    kv::chain_hashes(tokens.data() + block_size, block_size, rest.size(), chain[0], rest.data());
    if (rest[1] != chain[2]) fail("a chain cannot be gone on with", block_size, 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "histories";
  if (mode == "hashes") {
    print_hashes();
    return 0;
  }
  const std::uint64_t histories = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 2000;
  const std::uint64_t first_seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  hash_chains();
  for (std::uint64_t i = 0; i < histories; ++i) replay(first_seed + i, i % 2 == 1);
  std::printf("%llu histories, as the model says\n", static_cast<unsigned long long>(histories));
  return 0;
}
