// Drives the prefix owners without Python, for the sanitizers (sanitize.sh builds and runs it).
//   owners [N] [SEED]   N random histories against sets of all who ever claimed; exit 1 where a
//                       table tells more than them, or, before its first eviction, anything else
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "decision/prefix_owners.h"

namespace {

using Chain = std::vector<std::uint64_t>;
using Users = std::map<std::uint64_t, std::set<std::int64_t>>;

[[noreturn]] void fail(const std::string& what, std::uint64_t seed, int step) {
  std::fprintf(stderr, "%s (history of seed %llu, step %d)\n", what.c_str(),
               static_cast<unsigned long long>(seed), step);
  std::exit(1);
}

// A chain as prompts make them: each block's name is that of its whole prefix.
Chain tree_chain(std::mt19937_64& random) {
  Chain chain(random() % 40);
  std::uint64_t name = 1;
  const std::uint64_t branches = 1 + random() % 3;
  for (auto& block : chain) {
    name = name * 3 + random() % branches;
    block = name * 0xF1DE83E19937733DULL;
  }
  return chain;
}

std::size_t leading(const Chain& chain, const Users& users, std::size_t least) {
  const auto first = std::ranges::find_if(chain, [&](std::uint64_t block) {
    const auto found = users.find(block);
    return found == users.end() || found->second.size() < least;
  });
  return static_cast<std::size_t>(first - chain.begin());
}

void replay(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto room = static_cast<std::int64_t>(1 + random() % (random() % 2 == 0 ? 60 : 5000));
  kv::PrefixOwners table(room);
  Users users;
  for (int step = 0; step < 200; ++step) {
    const Chain chain = tree_chain(random);
    const auto owner = static_cast<std::int64_t>(random() % 5);
    if (random() % 3 != 0) {
      for (const auto block : chain) users[block].insert(owner);
      const std::size_t told = table.claim(chain, owner);
      const std::size_t exact = leading(chain, users, 2);
      if (told > exact) fail("more is shared than was claimed", seed, step);
      if (table.evicted() == 0 && told != exact) fail("a claim tells too little", seed, step);
    }
    const std::size_t shared = table.shared(chain);
    const auto [of, depth] = table.owner(chain);
    const std::size_t known = leading(chain, users, 1);
    if (shared > depth || depth > known || shared > leading(chain, users, 2)) {
      fail("more is known than was claimed", seed, step);
    }
    if (of >= 0 && !users[chain[depth - 1]].contains(of)) fail("not an owner", seed, step);
    if (table.evicted() == 0) {
      if (shared != leading(chain, users, 2) || depth != known) {
        fail("too little is known", seed, step);
      }
      if (known > 0 && (of >= 0) != (users[chain[known - 1]].size() == 1)) {
        fail("several are taken for one", seed, step);
      }
      if (table.size() != users.size()) fail("wrong number of blocks", seed, step);
    }
    if (table.size() > table.max_entries()) fail("too many blocks", seed, step);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t histories = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const std::uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (std::uint64_t i = 0; i < histories; ++i) replay(first_seed + i);
  std::printf("%llu histories, as the sets say\n", static_cast<unsigned long long>(histories));
  return 0;
}
