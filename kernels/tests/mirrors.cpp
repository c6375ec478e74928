// Drives the mirror without Python, for the sanitizers (sanitize.sh builds and runs it).
//   mirrors [N] [SEED]   N random histories against a plain list; exit 1 on a difference
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "mirror/mirror.h"

namespace {

using Chain = std::vector<std::uint64_t>;

[[noreturn]] void fail(const std::string& what, std::uint64_t seed, int step) {
  std::fprintf(stderr, "%s (history of seed %llu, step %d)\n", what.c_str(),
               static_cast<unsigned long long>(seed), step);
  std::exit(1);
}

// One worker's blocks, warmest first; the first `resident` of them are resident.
struct Model {
  struct Block {
    std::uint64_t hash;
    std::uint64_t stamp;
  };

  void touch(const Chain& whole, std::uint64_t stamp) {
    std::vector<Block> now;
    std::set<std::uint64_t> named;
    std::size_t fresh = 0;
    for (std::size_t i = 0; i < std::min(whole.size(), most_resident); ++i) {
      if (!named.insert(whole[i]).second) continue;
      fresh += place_of(whole[i]) >= resident ? 1U : 0U;
      now.push_back({whole[i], stamp});
    }
    for (const Block& block : blocks) {
      if (!named.contains(block.hash)) now.push_back(block);
    }
    blocks = now;
    resident += fresh;
    trim();
  }

  void forget(const Chain& chain, std::uint64_t stamp) {
    for (const auto hash : chain) {
      const std::size_t place = place_of(hash);
      if (place == blocks.size() || blocks[place].stamp != stamp) continue;
      resident -= place < resident ? 1U : 0U;
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(place));
    }
  }

  void drop_colder(std::uint64_t stamp) { resident = std::min(resident, warmer_than(stamp)); }

  void revive_warmer(std::uint64_t stamp) {
    resident = std::max(resident, std::min(warmer_than(stamp), most_resident));
  }

  void trim() {
    resident = std::min(resident, most_resident);
    if (blocks.size() > most_remembered) blocks.resize(most_remembered);
  }

  std::size_t place_of(std::uint64_t hash) const {
    const auto found = std::find_if(blocks.begin(), blocks.end(),
                                    [hash](const Block& block) { return block.hash == hash; });
    return static_cast<std::size_t>(found - blocks.begin());
  }

  std::size_t warmer_than(std::uint64_t stamp) const {
    return static_cast<std::size_t>(
        std::count_if(blocks.begin(), blocks.end(),
                      [stamp](const Block& block) { return block.stamp > stamp; }));
  }

  std::size_t most_resident = 0;
  std::size_t most_remembered = 0;
  std::size_t resident = 0;
  std::vector<Block> blocks;
};

void replay(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint64_t end) { return random() % end; };
  const std::size_t workers = 1 + below(4);
  kv::Mirror mirror(static_cast<std::int64_t>(workers), 400);
  std::vector<Model> models(workers);
  const std::uint64_t universe = 1 + below(300);
  // Multiples of the inverse of the table's multiplier all want the first places: long clusters.
  const bool clustered = below(2) == 0;
  const auto block = [&] {
    return clustered ? below(universe) * 0xF1DE83E19937733DULL : below(universe) - 1;
  };
  std::uint64_t stamp = 0;
  for (int step = 0; step < 150; ++step) {
    Chain chain(below(60));
    std::generate(chain.begin(), chain.end(), block);
    const std::size_t number = below(workers);
    const auto worker = static_cast<std::int64_t>(number);
    Model& model = models[number];
    const std::uint64_t some = stamp - std::min(stamp, below(20));
    switch (step < 4 ? 0 : below(12)) {
      case 0: {
        const std::size_t most = below(90);
        const std::size_t all = most + below(100 - most);
        mirror.resize(worker, static_cast<std::int64_t>(most), static_cast<std::int64_t>(all));
        model.most_resident = most;
        model.most_remembered = all;
        model.trim();
        break;
      }
      case 1: mirror.forget(worker, chain, some), model.forget(chain, some); break;
      case 2: mirror.drop_colder(worker, some), model.drop_colder(some); break;
      case 3: mirror.revive_warmer(worker, some), model.revive_warmer(some); break;
      case 4:
        mirror.clear_worker(worker);
        model.blocks.clear();
        model.resident = 0;
        break;
      default: stamp = mirror.touch(worker, chain).stamp, model.touch(chain, stamp);
    }
    if (mirror.held(worker) != model.resident) fail("wrong number resident", seed, step);
    if (mirror.remembered(worker) != model.blocks.size()) fail("wrong number", seed, step);
    std::set<std::uint64_t> resident;
    for (const Model& each : models) {
      for (std::size_t i = 0; i < each.resident; ++i) resident.insert(each.blocks[i].hash);
    }
    if (mirror.size() != resident.size()) fail("the index holds others", seed, step);
    Chain top;
    for (std::size_t i = 0; i < model.resident; ++i) top.push_back(model.blocks[i].hash);
    std::vector<std::int32_t> hits(workers);
    mirror.longest_prefix(top, hits.data());
    if (hits[number] != static_cast<std::int32_t>(top.size())) fail("a block is lost", seed, step);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t histories = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
  const std::uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (std::uint64_t i = 0; i < histories; ++i) replay(first_seed + i);
  std::printf("%llu histories, as the list says\n", static_cast<unsigned long long>(histories));
  return 0;
}
