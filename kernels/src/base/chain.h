// Chain hashes: the name of a block that includes everything before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kv {

// XXH3-64, seed 0, of `size` bytes in a row.
std::uint64_t hash_bytes(const std::uint8_t* bytes, std::size_t size);

// The seed that starts a chain; `kvkernels.chain_seed` says why there is one. 0 without adapter and
// salt (empty is none), else XXH3-64 of [model, adapter or nil, salt or nil] as msgpack in its
// shortest form.
std::uint64_t chain_seed(std::string_view model, std::string_view lora, std::string_view salt);

// Writes the chain hashes of `blocks` full blocks of `block_size` tokens each to `chain`:
//   h_i = XXH3-64(h_{i-1} as 8 little-endian bytes + tokens of block i), h_{-1} = seed.
// `tokens` holds at least blocks * block_size values; `chain` has room for `blocks`.
void chain_hashes(const std::int32_t* tokens, std::size_t block_size, std::size_t blocks,
                  std::uint64_t seed, std::uint64_t* chain);

// The same of ids of 64 bits. A block whose ids all fit into an int32 has the hash that it
// has above; another one is hashed over its ids as 8 bytes each. `scratch` is overwritten.
void chain_hashes(const std::int64_t* tokens, std::size_t block_size, std::size_t blocks,
                  std::uint64_t seed, std::uint64_t* chain, std::vector<std::uint8_t>& scratch);

// Appends what is hashed of one block of such ids.
void append_block(const std::int64_t* tokens, std::size_t block_size,
                  std::vector<std::uint8_t>& bytes);

// The same of `block_bytes` bytes a block, a multiple of 4, which may lie at any address.
void chain_hashes(const std::uint8_t* bytes, std::size_t block_bytes, std::size_t blocks,
                  std::uint64_t seed, std::uint64_t* chain);

}  // namespace kv
