#include "base/chain_media.h"

#include <algorithm>
#include <cstring>

#include "base/chain.h"

namespace kv {
namespace {

void append_tokens(const std::int32_t* tokens, std::size_t count,
                   std::vector<std::uint8_t>& bytes) {
  const std::size_t before = bytes.size();
  bytes.resize(before + count * sizeof *tokens);
  std::memcpy(bytes.data() + before, tokens, count * sizeof *tokens);
}

void append_tokens(const std::int64_t* tokens, std::size_t count,
                   std::vector<std::uint8_t>& bytes) {
  append_block(tokens, count, bytes);
}

// The media of one block after another, as vLLM finds them (`_gen_mm_extra_hash_keys` in
// `v1/core/kv_cache_utils.py`, 0.32). Lifetime: request (one call).
class MediaOfBlocks {
 public:
  explicit MediaOfBlocks(std::span<const Medium> media)
      : media_(media), end_(media.empty() ? 0 : media.back().offset + media.back().length) {}

  // Where the next medium begins, for blocks that begin at `start` or later; -1 where the last one
  // has ended, even if one of those before it has not.
  std::int64_t next(std::int64_t start) {
    if (start >= end_) return -1;
    while (!media_.empty() && start >= media_.front().offset + media_.front().length) {
      media_ = media_.subspan(1);
    }
    return media_.empty() ? -1 : media_.front().offset;
  }

  // Writes what is hashed of the media of the block from `start` to `end`.
  void write(std::int64_t start, std::int64_t end, std::string& extra) {
    extra.clear();
    for (; next(start) >= 0 && media_.front().offset < end; media_ = media_.subspan(1)) {
      const Medium& medium = media_.front();
      append_medium(medium.identifier, static_cast<std::uint32_t>(medium.offset - start), extra);
      if (medium.offset + medium.length > end) break;
    }
  }

 private:
  std::span<const Medium> media_;
  std::int64_t end_;
};

void hash_plain(const std::int32_t* tokens, std::size_t block_size, std::size_t blocks,
                std::uint64_t seed, std::uint64_t* chain, std::vector<std::uint8_t>&) {
  chain_hashes(tokens, block_size, blocks, seed, chain);
}

void hash_plain(const std::int64_t* tokens, std::size_t block_size, std::size_t blocks,
                std::uint64_t seed, std::uint64_t* chain, std::vector<std::uint8_t>& scratch) {
  chain_hashes(tokens, block_size, blocks, seed, chain, scratch);
}

}  // namespace

void append_medium(std::string_view identifier, std::uint32_t offset, std::string& extra) {
  extra += identifier;
  for (std::uint32_t i = 0; i < kMediumOffsetBytes; ++i) {
    extra += static_cast<char>(offset >> (8 * i) & 0xFF);
  }
}

template <class Id>
std::uint64_t chain_hash(std::uint64_t before, const Id* tokens, std::size_t block_size,
                         std::string_view extra, std::vector<std::uint8_t>& scratch) {
  scratch.resize(sizeof before);
  std::memcpy(scratch.data(), &before, sizeof before);
  append_tokens(tokens, block_size, scratch);
  scratch.insert(scratch.end(), extra.begin(), extra.end());
  return hash_bytes(scratch.data(), scratch.size());
}

template <class Id>
void media_chain_hashes(std::span<const Id> tokens, std::size_t block_size, std::uint64_t seed,
                        std::span<const Medium> media, std::uint64_t* chain) {
  const std::size_t blocks = tokens.size() / block_size;
  std::vector<std::uint8_t> scratch;
  std::string extra;
  MediaOfBlocks rest(media);
  for (std::size_t i = 0; i < blocks;) {
    const std::int64_t start = static_cast<std::int64_t>(i * block_size);
    const std::int64_t offset = rest.next(start);
    const std::size_t with = offset < 0 ? blocks : static_cast<std::size_t>(offset) / block_size;
    const std::size_t plain = std::min(blocks, std::max(i, with)) - i;
    if (plain > 0) {
      hash_plain(tokens.data() + i * block_size, block_size, plain, seed, chain + i, scratch);
      seed = chain[i + plain - 1];
      i += plain;
      continue;
    }
    rest.write(start, start + static_cast<std::int64_t>(block_size), extra);
    seed = chain_hash(seed, tokens.data() + i * block_size, block_size, extra, scratch);
    chain[i++] = seed;
  }
}

template std::uint64_t chain_hash(std::uint64_t, const std::int32_t*, std::size_t,
                                  std::string_view, std::vector<std::uint8_t>&);
template std::uint64_t chain_hash(std::uint64_t, const std::int64_t*, std::size_t,
                                  std::string_view, std::vector<std::uint8_t>&);
template void media_chain_hashes(std::span<const std::int32_t>, std::size_t, std::uint64_t,
                                 std::span<const Medium>, std::uint64_t*);
template void media_chain_hashes(std::span<const std::int64_t>, std::size_t, std::uint64_t,
                                 std::span<const Medium>, std::uint64_t*);

}  // namespace kv
