// Chain hashes of prompts whose tokens stand in part for media: images, sounds, videos.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kv {

// A medium and the tokens that stand for it.
struct Medium {
  std::string identifier;
  std::int64_t offset;  // of its first token in the prompt
  std::int64_t length;  // in tokens
};

constexpr std::uint32_t kMediumOffsetBytes = 4;

// Appends what is hashed of a medium behind the tokens of a block: its identifier, then where
// it begins, counted from the begin of the block, little-endian.
void append_medium(std::string_view identifier, std::uint32_t offset, std::string& extra);

// The chain hash of one block: XXH3-64 of the hash before it, its tokens, and `extra` behind them.
// `scratch` is overwritten.
template <class Id>
std::uint64_t chain_hash(std::uint64_t before, const Id* tokens, std::size_t block_size,
                         std::string_view extra, std::vector<std::uint8_t>& scratch);

// Chain hashes as `chain_hashes` makes them, but that each block which has tokens of media is
// hashed with these media. `media` are in the order of their offsets.
template <class Id>
void media_chain_hashes(std::span<const Id> tokens, std::size_t block_size, std::uint64_t seed,
                        std::span<const Medium> media, std::uint64_t* chain);

}  // namespace kv
