// Random lives of virtual workers without Python, for the sanitizers (sanitize.sh builds and runs
// it): `workers [N] [SEED]`, exit 1 when a promise is broken. What the answers must be, tests
// against the plain twin say; here each life is lived by two workers, one asked at its own times
// only and one at many others too, and both must tell the same.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "virtual_worker/virtual_worker.h"

namespace {

using kv::engine::Change;
using kv::engine::ChangeKind;
using kv::engine::VirtualWorker;
using Ids = std::vector<std::int64_t>;

[[noreturn]] void fail(const std::string& what, std::uint64_t seed) {
  std::fprintf(stderr, "%s (life of seed %llu)\n", what.c_str(),
               static_cast<unsigned long long>(seed));
  std::exit(1);
}

class Life {
 public:
  explicit Life(std::uint64_t seed)
      : seed_(seed), random_(seed), settings_(settings()), quiet_(settings_), asked_(settings_) {}

  void live(int calls) {
    for (int call = 0; call < calls; ++call) {
      run_until(now_ns_ + below(below(4) == 0 ? 1 : 60'000'000));
      act();
      compare();
    }
    while (quiet_.next_ns() >= 0) run_until(quiet_.next_ns());
    if (asked_.next_ns() >= 0 || !open_.empty()) fail("somebody never ended", seed_);
  }

 private:
  std::int64_t below(std::int64_t end) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(end));
  }

  kv::engine::WorkerSettings settings() {
    kv::engine::WorkerSettings settings{};
    settings.block_size = 1 + below(5);
    settings.blocks = static_cast<std::uint32_t>(8 + below(below(2) == 0 ? 12 : 200));
    settings.step_time = {2.1e-5, 3.3e-9, 4.7e-3, 1.3e-8, 3.1e-3, 0.06, 0.002, 15e-6, 1.5};
    settings.scheduler = {24, 1 + below(6), 60, 4, 0.1, 0.05, 12, 2 * below(5)};
    settings.host_blocks = static_cast<std::uint32_t>(below(2) == 0 ? 0 : below(60));
    settings.load_block_s = 0.003 * static_cast<double>(below(4));
    settings.record_events = true;
    settings.speed = 1.0;
    return settings;
  }

  template <class Call>
  void both(Call call) {
    quiet_.settle(now_ns_);
    asked_.settle(now_ns_);
    if (call(quiet_) != call(asked_)) fail("two answers to one call", seed_);
  }

  void act() {
    switch (below(12)) {
      case 0: {
        const std::int64_t id = below(serial_ + 1);
        both([id](VirtualWorker& worker) { return worker.cancel(id); });
        open_.erase(id);
        break;
      }
      case 1: {
        both([](VirtualWorker& worker) { return worker.clear(), true; });
        break;
      }
      case 2: {
        if (below(4) != 0) break;
        both([](VirtualWorker& worker) { return worker.abort(); });
        open_.clear();
        visible_dropped_ = true;
        break;
      }
      case 3: {
        const double speed = 0.5 + static_cast<double>(below(5));
        both([speed](VirtualWorker& worker) { return worker.set_speed(speed), true; });
        break;
      }
      default: add();
    }
  }

  // A chain from a tree of few branches. On the heap and of the exact size: reads past it show.
  std::vector<std::uint64_t> chain() {
    std::vector<std::uint64_t> hashes(static_cast<std::size_t>(below(14)));
    std::uint64_t parent = 77;
    for (std::uint64_t& hash : hashes) {
      parent = (parent ^ static_cast<std::uint64_t>(below(8) / 7)) * 0x9E3779B97F4A7C15ULL + 1;
      hash = parent;
    }
    return hashes;
  }

  void add() {
    const auto names = chain();
    const kv::engine::NewRequest request{serial_, names, below(60), below(40), below(3) - 1};
    kv::engine::Refusal refusal{};
    both([&](VirtualWorker& worker) { return refusal = worker.add(request); });
    if (refusal == kv::engine::Refusal::none) open_.insert(serial_);
    ++serial_;
  }

  void run_until(std::int64_t end_ns) {
    for (std::int64_t next; (next = quiet_.next_ns()) >= 0 && next <= end_ns;) {
      while (now_ns_ < next && below(3) == 0) {
        now_ns_ += below(next - now_ns_);
        asked_.settle(now_ns_);  // in the middle of a run
      }
      now_ns_ = next;
      tell();
    }
    now_ns_ = std::max(now_ns_, end_ns);
  }

  void tell() {
    both([](VirtualWorker& worker) { return worker.outputs().first; });
    both([](VirtualWorker& worker) { return worker.outputs().finished; });
    for (const std::int64_t id : quiet_.outputs().finished) {
      if (open_.erase(id) == 0) fail("an end nobody waits for", seed_);
    }
    std::vector<std::vector<std::uint64_t>> told[2];
    VirtualWorker* workers[2] = {&quiet_, &asked_};
    for (int i = 0; i < 2; ++i) {
      workers[i]->changes().take([&](const Change& change, auto hashes) {
        told[i].emplace_back(hashes.begin(), hashes.end());
        if (i == 0) follow(change, hashes);
      });
      workers[i]->outputs() = {};
    }
    if (told[0] != told[1]) fail("two accounts of one cache", seed_);
  }

  // Changes must make sense to who follows them.
  template <class Hashes>
  void follow(const Change& change, Hashes hashes) {
    if (visible_dropped_) {
      visible_.clear();
      in_host_.clear();
      visible_dropped_ = false;
    }
    if (change.kind == ChangeKind::cleared) {
      visible_.clear();
      in_host_.clear();
    }
    const bool stored = change.kind == ChangeKind::stored;
    if (stored && change.has_parent && !visible_.contains(change.parent)) {
      fail("stored behind a parent that is not there", seed_);
    }
    const bool comes = stored || change.kind == ChangeKind::stored_host;
    const bool of_host =
        change.kind == ChangeKind::stored_host || change.kind == ChangeKind::removed_host;
    std::set<std::uint64_t>& held = of_host ? in_host_ : visible_;
    for (const std::uint64_t hash : hashes) {
      if (change.kind == ChangeKind::stored_host && !visible_.contains(hash)) {
        fail("the host has what the GPU never had", seed_);
      }
      const bool sensible = comes ? held.insert(hash).second : held.erase(hash) == 1;
      if (!sensible) fail("a change that changes nothing", seed_);
    }
  }

  void compare() {
    for (VirtualWorker* worker : {&quiet_, &asked_}) {
      worker->settle(now_ns_);
      const std::string wrong = worker->check();
      if (!wrong.empty()) fail(wrong, seed_);
    }
    both([](VirtualWorker& worker) { return worker.progress(); });
    both([](VirtualWorker& worker) { return worker.stats().busy_ns; });
    both([](VirtualWorker& worker) { return worker.queued_tokens(); });
    const auto names = chain();
    both([&](VirtualWorker& worker) { return worker.hit_blocks(names); });
    both([](VirtualWorker& worker) { return worker.snapshot().size(); });
    both([](VirtualWorker& worker) { return worker.host_contents(); });
  }

  std::uint64_t seed_;
  std::mt19937_64 random_;
  kv::engine::WorkerSettings settings_;
  VirtualWorker quiet_;  // asked at its own times
  VirtualWorker asked_;  // and at others
  std::int64_t now_ns_ = 0;
  std::int64_t serial_ = 0;
  std::set<std::int64_t> open_;
  std::set<std::uint64_t> visible_;
  std::set<std::uint64_t> in_host_;
  bool visible_dropped_ = false;
};

// Chains that name no prefixes: hashes repeat within one and mean something else in the next. A
// worker may give any answer to them, or refuse to go on, which it must then do for good; what the
// sanitizers see is all that is asked.
bool lives_on(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  kv::engine::WorkerSettings settings{};
  settings.block_size = 1 + below(3);
  settings.blocks = static_cast<std::uint32_t>(8 + below(40));
  settings.step_time = {2.1e-5, 3.3e-9, 4.7e-3, 1.3e-8, 3.1e-3, 0.06, 0.002, 15e-6, 1.5};
  settings.scheduler = {24, 1 + below(6), 60, 4, 0.1, 0.05, 12, 2 * below(5)};
  settings.host_blocks = static_cast<std::uint32_t>(below(3) * below(40));
  settings.load_block_s = 0.003;
  settings.record_events = true;
  settings.speed = 1.0;
  VirtualWorker worker(settings);
  bool sound = true;
  std::int64_t now_ns = 0;
  for (std::int64_t call = 0; call < 120; ++call) {
    std::vector<std::uint64_t> names(static_cast<std::size_t>(below(14)));
    for (std::uint64_t& name : names) name = static_cast<std::uint64_t>(below(9));
    try {
      now_ns += below(30'000'000);
      worker.settle(now_ns);
      worker.add({call, names, below(60), below(40), below(3) - 1});
      if (below(6) == 0) worker.cancel(below(call + 1));
      if (below(20) == 0) worker.clear();
      if (below(40) == 0) worker.abort();
      worker.progress();
      worker.stats();
      worker.queued_tokens();
      worker.next_ns();
      worker.hit_blocks(names);
      worker.snapshot();
      worker.host_contents();
      if (!sound) fail("it goes on after it broke", seed);
    } catch (const std::exception&) {
      sound = false;
    }
    worker.check();
  }
  return sound;
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t lives = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const std::uint64_t first_seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (std::uint64_t i = 0; i < lives; ++i) Life(first_seed + i).live(120);
  std::uint64_t sound = 0;
  for (std::uint64_t i = 0; i < lives; ++i) {
    sound += static_cast<unsigned>(lives_on(first_seed + i));
  }
  if (lives >= 100 && (sound == 0 || sound == lives)) fail("all hostile lives end alike", 0);
  std::printf("%llu lives, each told alike\n", static_cast<unsigned long long>(lives));
  return 0;
}
