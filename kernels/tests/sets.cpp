// Drives the forms of worker sets, the pool below them and the readers of the index beside a
// writer, without Python, for the sanitizers (sanitize.sh builds and runs it).
//   sets [N] [SEED]      N random histories of sets against std::set; exit 1 on a difference
//   threads [ROUNDS]     look-ups beside a writer; each answer must have been true at a moment
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "index/prefix_index.h"
#include "worker_set/worker_set.h"

namespace {

[[noreturn]] void fail(const char* what, std::uint64_t seed) {
  std::fprintf(stderr, "%s (seed %llu)\n", what, static_cast<unsigned long long>(seed));
  std::exit(1);
}

// The smallest form for these seats, but for the slack that keeps a shrinking set where it is.
void expect_small(const kv::WorkerSets& sets, std::uint64_t word, const std::set<unsigned>& model,
                  std::uint64_t seed) {
  const bool in_word = kv::form_of(word) == kv::SetForm::lanes;
  if (model.size() > kv::lanes::kMost && in_word) fail("too many seats in a word", seed);
  if (model.size() <= 3 && !in_word) fail("few seats, but not in the word", seed);
  if (in_word) return;
  std::set<unsigned> chunks;
  for (const unsigned seat : model) chunks.insert(seat / kv::BitmapForm::kChunkBits);
  const std::size_t as_array = kv::SetPool::rounded(kv::ArrayForm::units_for(model.size()));
  const std::size_t as_bitmap = kv::SetPool::rounded(kv::BitmapForm::units_for(chunks.size()));
  const std::size_t units = kv::form_of(word) == kv::SetForm::array
                                ? sets.array(word).units()
                                : kv::SetPool::rounded(sets.bitmap(word).units());
  if (units > as_array + 8 && units > as_bitmap + 8) fail("a set larger than it need be", seed);
}

void history(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint64_t end) { return random() % end; };
  kv::WorkerSets sets;
  std::vector<std::uint64_t> words(1 + below(40), kv::lanes::empty(0));
  std::vector<std::set<unsigned>> models(words.size());
  const unsigned widths[] = {5, 64, 200, 4096, kv::WorkerSets::kMostSeats};
  const unsigned width = widths[below(5)];
  const std::uint64_t warmth = below(4) * kv::kOneUse;
  for (auto& word : words) word += warmth;
  // Phases of growing and of shrinking, so that every form is entered from both sides.
  for (int phase = 0; phase < 6; ++phase) {
    for (int step = 0; step < 1500; ++step) {
      const std::size_t i = below(words.size());
      const auto seat = static_cast<unsigned>(below(width));
      const bool grow = below(10) < (phase % 2 == 0 ? 9U : 1U);
      // Shrinking at random would hardly ever meet a seat of a wide set.
      const unsigned known = models[i].empty() ? seat : *models[i].rbegin();
      const unsigned out = below(4) == 0 ? seat : known;
      const bool changed = grow ? sets.insert(words[i], seat) : sets.erase(words[i], out);
      const bool wanted = grow ? models[i].insert(seat).second : models[i].erase(out) == 1;
      if (changed != wanted) fail("a change told wrong", seed);
      if ((words[i] & kv::kWarmth) != warmth) fail("warmth was lost", seed);
      if (sets.contains(words[i], seat) != models[i].contains(seat)) fail("wrong member", seed);
      expect_small(sets, words[i], models[i], seed);
    }
    for (std::size_t i = 0; i < words.size(); ++i) {
      std::set<unsigned> seen;
      sets.each(words[i], [&](unsigned seat) { seen.insert(seat); });
      if (seen != models[i]) fail("other seats than were put in", seed);
      if (kv::WorkerSets::empty(words[i]) != models[i].empty()) fail("emptiness told wrong", seed);
    }
  }
  for (auto& word : words) sets.drop(word);
  if (sets.used_bytes() != 0) fail("the pool lost a piece", seed);
}

// Worker 0 steps between 1000 and 3000 blocks of a chain, worker 1 holds all, worker 2 is
// cleared and filled. Slices end every 2048 blocks, so worker 0's whole steps of 1000 blocks
// must be seen as such: its hits are 1000, 2000 or 3000 at any moment.
void threads(int rounds) {
  kv::PrefixIndex index(3, 1 << 16);
  std::vector<std::uint64_t> chain(4000);
  for (std::size_t i = 0; i < chain.size(); ++i) chain[i] = i * 0x9E3779B97F4A7C15ULL;
  const std::span<const std::uint64_t> all(chain);
  index.store(0, all.first(1000));
  index.store(1, all);
  std::atomic<bool> stop{false};
  std::atomic<long> looked{0};
  const auto look = [&] {
    std::vector<std::int32_t> hits(3 * index.workers());
    while (!stop.load()) {
      index.longest_prefix_tiers(all, hits.data());
      index.longest_prefix(all, hits.data());
      if (hits[0] % 1000 != 0 || hits[0] == 0) fail("a torn answer", 0);
      if (hits[1] != 4000) fail("a worker lost blocks it holds", 1);
      if (hits[2] != 0 && hits[2] != 500) fail("a torn answer for a cleared worker", 2);
      if (index.held(1) != 4000 || index.tiers() > 2) fail("a wrong count", 3);
      ++looked;
    }
  };
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back(look);
  for (int round = 0; round < rounds || looked.load() < rounds; ++round) {
    index.store(0, all.subspan(1000, 1000));
    index.store(0, all.subspan(2000, 1000));
    index.store(2, all.first(500));
    index.remove(0, all.subspan(2000, 1000));
    index.store(1, all.first(10), 1);
    index.clear_worker(2);
    index.remove(0, all.subspan(1000, 1000));
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  std::printf("%ld look-ups, none torn\n", looked.load());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "sets";
  if (mode == "threads") {
    threads(argc > 2 ? std::atoi(argv[2]) : 100);
    return 0;
  }
  const std::uint64_t histories = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 60;
  const std::uint64_t first_seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  for (std::uint64_t i = 0; i < histories; ++i) history(first_seed + i);
  std::printf("%llu histories of sets, as std::set says\n",
              static_cast<unsigned long long>(histories));
  return 0;
}
