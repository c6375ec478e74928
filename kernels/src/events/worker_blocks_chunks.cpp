// Chunks of several blocks under one name, as LMCache keeps them in host memory.
#include <algorithm>
#include <utility>

#include "base/chain.h"
#include "events/worker_blocks.h"

namespace kv {
namespace {

// A block within a chunk has no name at the engine. Chunks that begin alike share it.
std::uint64_t inner_name(std::uint64_t chain) { return chain ^ 0x6B6E756863FF00FFULL; }

std::vector<std::uint64_t> inner_names(const std::vector<std::uint64_t>& chains) {
  std::vector<std::uint64_t> names(chains.size());
  std::transform(chains.begin(), chains.end(), names.begin(), inner_name);
  return names;
}

}  // namespace

// A chunk's name stands for its last block; those before it are held as often as chunks have them.
void WorkerBlocks::hold_chunks(const Stored& run, std::uint64_t seed, bool counts_copies) {
  std::vector<std::uint64_t> chain(run.unit);
  for (std::size_t i = 0; i < run.names.size(); ++i) {
    const std::uint64_t name = run.names[i];
    const BlockNames::Known known = names_.find(name);
    const bool is_new = !chunks_.contains(name);
    if (is_new) {
      const std::size_t at = i * run.unit * block_size_;
      if (run.wide.empty()) {
        chain_hashes(run.tokens.data() + at, block_size_, run.unit, seed, chain.data());
      } else {
        chain_hashes(run.wide.data() + at, block_size_, run.unit, seed, chain.data(), bytes_);
      }
    }
    seed = known ? known.chain() : chain.back();
    hold(std::span(&name, 1), std::span(&seed, 1), run.tier, counts_copies);
    if (!is_new) continue;
    chunks_.emplace(name, std::vector(chain.begin(), chain.end() - 1));
    hold_inner(name, run.tier);
  }
}

void WorkerBlocks::hold_inner(std::uint64_t chunk, std::uint8_t tier) {
  const auto found = chunks_.find(chunk);
  if (tier == 0 || found == chunks_.end()) return;
  const std::vector<std::uint64_t> chains = found->second;
  hold(inner_names(chains), chains, tier, true);
}

void WorkerBlocks::drop_inner(std::uint64_t chunk, std::uint8_t tier) {
  const auto found = chunks_.find(chunk);
  if (tier == 0 || found == chunks_.end()) return;
  drop(inner_names(found->second), tier);
}

// The name stands for another block now, or for none.
void WorkerBlocks::forget_chunk(std::uint64_t chunk, std::uint8_t tiers) {
  for (std::uint8_t tier = 1; tier < kTiers; ++tier) {
    if ((tiers >> tier & 1) != 0) drop_inner(chunk, tier);
  }
  chunks_.erase(chunk);
}

// Groups cannot judge their blocks: nobody knows the names that the engine has for them.
void WorkerBlocks::forget_chunks() {
  std::vector<std::uint64_t> chunks;
  for (const auto& [chunk, inner] : chunks_) chunks.push_back(chunk);
  for (const std::uint64_t& chunk : chunks) {
    for (std::uint8_t tier = 1; tier < kTiers; ++tier) {
      copies_[tier].erase(chunk);
      drop(std::span(&chunk, 1), tier);
    }
  }
  chunks_.clear();
}

}  // namespace kv
