// Hostile KV events: any bytes are decoded or refused, and what is decoded is applied to a worker's
// blocks on a small index, whose state is then dumped and loaded again. For libFuzzer;
// tests/kernels/fuzz/test_events.py builds it with the address and undefined-behaviour sanitizers.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "events/event_batch.h"
#include "events/worker_blocks.h"
#include "index/prefix_index.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// One long history over all inputs, so that they meet each other's orphans and evictions.
struct World {
  kv::PrefixIndex index{2, 4096};
  kv::WorkerBlocks blocks{index, 1, 16, "m", 64, true};

  void take(std::span<const std::uint8_t> payload) {
    const kv::EventBatch batch(payload);
    std::size_t stored = 0;
    for (const kv::Event& event : batch.events()) {
      if (event.kind != kv::Event::Kind::stored) continue;
      stored += event.names;
      require(event.tokens == 0 || event.masked ||
                  event.tokens == std::uint64_t{event.names} * event.block_size,
              "an event has tokens of parts of blocks");
      for (const std::int32_t token : batch.tokens(event)) require(token >= 0, "no token");
      for (std::size_t i = 0; i < event.names; ++i) (void)batch.extra(event, i).size();
    }
    require(stored == batch.blocks(), "stored blocks are miscounted");
    // What somebody computed that its blocks are, or nothing of it.
    if (batch.rank() % 2 == 0) {
      blocks.apply(batch, {batch.names(), batch.names()});
    } else {
      blocks.apply(batch);
    }
    require(blocks.parked() <= 64, "more is parked than may be");
    if (++batches_ % 64 == 0) check();
    if (blocks.size() > 2000) blocks.clear();
  }

 private:
  void check() {
    for (int tier = 0; tier < kv::WorkerBlocks::kTiers; ++tier) {
      const auto held = blocks.chains(tier);
      const std::size_t claimed = index.held(1, tier);
      require(claimed <= held.size(), "the index claims more than there are names");
      require(index.contains(1, held, tier) == claimed, "the index claims what has no name");
    }
    const std::string dump = blocks.dump();
    blocks.load(dump);
    require(blocks.dump() == dump, "a dump came back changed");
  }

  std::size_t batches_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static World world;
  try {
    world.take({data, size});
  } catch (const std::invalid_argument&) {
    // refused, with a reason
  }
  try {
    world.blocks.load({reinterpret_cast<const char*>(data), size});
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
