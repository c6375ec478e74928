#include "base/chain.h"

#include <algorithm>
#include <cstring>

#include "base/xxh3.h"

namespace kv {
namespace {

// A message that lies in one piece.
class Flat {
 public:
  Flat(const std::uint8_t* bytes, std::size_t size) : bytes_(bytes), size_(size) {}

  std::size_t size() const { return size_; }
  std::uint8_t byte(std::size_t offset) const { return bytes_[offset]; }
  std::uint32_t u32(std::size_t offset) const { return xxh3::load32(bytes_ + offset); }
  std::uint64_t u64(std::size_t offset) const { return xxh3::load64(bytes_ + offset); }
  const std::uint8_t* stripe(std::size_t offset, std::uint8_t*) const { return bytes_ + offset; }

 private:
  const std::uint8_t* bytes_;
  std::size_t size_;
};

// The parent's hash (8 bytes) followed by the tokens of a block, which stay where they are.
class Link {
 public:
  Link(std::uint64_t parent, const std::uint8_t* tokens, std::size_t token_bytes)
      : parent_(parent), tokens_(tokens), size_(kParent + token_bytes) {}

  std::size_t size() const { return size_; }

  std::uint8_t byte(std::size_t offset) const {
    return offset < kParent ? static_cast<std::uint8_t>(parent_ >> (8 * offset))
                            : tokens_[offset - kParent];
  }

  // Offsets are multiples of 4 here, because tokens are, so half a read is the only crossing.
  std::uint32_t u32(std::size_t offset) const {
    return offset < kParent ? static_cast<std::uint32_t>(parent_ >> (8 * offset))
                            : xxh3::load32(tokens_ + offset - kParent);
  }

  std::uint64_t u64(std::size_t offset) const {
    if (offset >= kParent) return xxh3::load64(tokens_ + offset - kParent);
    if (offset == 0) return parent_;
    return u32(offset) | (std::uint64_t{u32(offset + 4)} << 32);
  }

  const std::uint8_t* stripe(std::size_t offset, std::uint8_t* scratch) const {
    if (offset >= kParent) return tokens_ + offset - kParent;
    // Only the first stripe starts in the parent: the last one starts past 240 - 64 bytes.
    std::memcpy(scratch, &parent_, kParent);
    std::memcpy(scratch + kParent, tokens_, xxh3::detail::kStripe - kParent);
    return scratch;
  }

 private:
  static constexpr std::size_t kParent = sizeof(std::uint64_t);

  std::uint64_t parent_;
  const std::uint8_t* tokens_;
  std::size_t size_;
};

}  // namespace

std::uint64_t hash_bytes(const std::uint8_t* bytes, std::size_t size) {
  return xxh3::hash(Flat(bytes, size));
}

void chain_hashes(const std::int32_t* tokens, std::size_t block_size, std::size_t blocks,
                  std::uint64_t seed, std::uint64_t* chain) {
  chain_hashes(reinterpret_cast<const std::uint8_t*>(tokens), block_size * sizeof(std::int32_t),
               blocks, seed, chain);
}

void append_block(const std::int64_t* tokens, std::size_t block_size,
                  std::vector<std::uint8_t>& bytes) {
  const std::size_t before = bytes.size();
  const auto is_wide = [](std::int64_t id) { return id != static_cast<std::int32_t>(id); };
  if (std::any_of(tokens, tokens + block_size, is_wide)) {
    bytes.resize(before + block_size * sizeof(std::int64_t));
    std::memcpy(bytes.data() + before, tokens, block_size * sizeof(std::int64_t));
    return;
  }
  bytes.resize(before + block_size * sizeof(std::int32_t));
  for (std::size_t i = 0; i < block_size; ++i) {
    const auto id = static_cast<std::int32_t>(tokens[i]);
    std::memcpy(bytes.data() + before + i * sizeof id, &id, sizeof id);
  }
}

void chain_hashes(const std::int64_t* tokens, std::size_t block_size, std::size_t blocks,
                  std::uint64_t seed, std::uint64_t* chain, std::vector<std::uint8_t>& scratch) {
  for (std::size_t i = 0; i < blocks; ++i, tokens += block_size) {
    scratch.clear();
    append_block(tokens, block_size, scratch);
    seed = xxh3::hash(Link(seed, scratch.data(), scratch.size()));
    chain[i] = seed;
  }
}

void chain_hashes(const std::uint8_t* bytes, std::size_t block_bytes, std::size_t blocks,
                  std::uint64_t seed, std::uint64_t* chain) {
  for (std::size_t i = 0; i < blocks; ++i, bytes += block_bytes) {
    seed = xxh3::hash(Link(seed, bytes, block_bytes));
    chain[i] = seed;
  }
}

}  // namespace kv
