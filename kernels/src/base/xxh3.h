// XXH3-64 with seed 0 and the default secret, written from the public specification
// (Y. Collet, "XXH3", doc/xxhash_spec.md of the xxHash project, 2023). Our own implementation,
// because a build must need nothing but a compiler, and because ours hashes a message whose
// first 8 bytes (the parent's hash) lie elsewhere than the rest (the tokens): nothing is copied.
//
// The functions are templates over a Message, which gives `size()`, little-endian `u32(offset)`
// and `u64(offset)`, `byte(offset)`, and `stripe(offset, scratch)`: a pointer to the 64 bytes
// there, gathered in `scratch` where they do not lie in a row.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kv::xxh3 {

static_assert(std::endian::native == std::endian::little, "hashes are defined on little-endian");

inline std::uint32_t load32(const std::uint8_t* at) {
  std::uint32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline std::uint64_t load64(const std::uint8_t* at) {
  std::uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

namespace detail {

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1U;
constexpr std::uint64_t kPrime32_2 = 0x85EBCA77U;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5ULL;
constexpr std::uint64_t kMix1 = 0x165667919E3779F9ULL;
constexpr std::uint64_t kMix2 = 0x9FB21C651E98DF25ULL;

constexpr std::size_t kStripe = 64;        // bytes taken at once by the long form
constexpr std::size_t kSecretStep = 8;     // the secret moves on by this much a stripe
constexpr std::size_t kStripesPerBlock = 16;
constexpr std::size_t kLongBlock = kStripe * kStripesPerBlock;

constexpr std::array<std::uint8_t, 192> kSecret = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// An array with a byte too few would compile, padded with a zero.
static_assert(kSecret.back() == 0x7e);

inline std::uint64_t secret64(std::size_t offset) { return load64(kSecret.data() + offset); }
inline std::uint32_t secret32(std::size_t offset) { return load32(kSecret.data() + offset); }

// The 128-bit product, its halves folded together by xor.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t avalanche(std::uint64_t h) {
  h = (h ^ (h >> 37)) * kMix1;
  return h ^ (h >> 32);
}

inline std::uint64_t avalanche_short(std::uint64_t h) {
  h = (h ^ (h >> 33)) * kPrime64_2;
  h = (h ^ (h >> 29)) * kPrime64_3;
  return h ^ (h >> 32);
}

template <class Message>
std::uint64_t mix16(const Message& m, std::size_t offset, std::size_t secret) {
  return fold(m.u64(offset) ^ secret64(secret), m.u64(offset + 8) ^ secret64(secret + 8));
}

template <class Message>
std::uint64_t hash_to_16(const Message& m) {
  const std::uint64_t size = m.size();
  if (size > 8) {
    const std::uint64_t low = m.u64(0) ^ secret64(24) ^ secret64(32);
    const std::uint64_t high = m.u64(size - 8) ^ secret64(40) ^ secret64(48);
    return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
  }
  if (size >= 4) {
    const std::uint64_t both = m.u32(size - 4) + (std::uint64_t{m.u32(0)} << 32);
    std::uint64_t h = both ^ secret64(8) ^ secret64(16);
    h = (h ^ std::rotl(h, 49) ^ std::rotl(h, 24)) * kMix2;
    h = (h ^ ((h >> 35) + size)) * kMix2;
    return h ^ (h >> 28);
  }
  if (size > 0) {
    const std::uint64_t bytes = (std::uint64_t{m.byte(0)} << 16) |
                                (std::uint64_t{m.byte(size >> 1)} << 24) |
                                std::uint64_t{m.byte(size - 1)} | (size << 8);
    return avalanche_short(bytes ^ (secret32(0) ^ secret32(4)));
  }
  return avalanche_short(secret64(56) ^ secret64(64));
}

template <class Message>
std::uint64_t hash_to_128(const Message& m) {
  const std::size_t size = m.size();
  std::uint64_t sum = size * kPrime64_1;
  for (std::size_t i = (size - 1) / 32 + 1; i-- > 0;) {
    sum += mix16(m, 16 * i, 32 * i) + mix16(m, size - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(sum);
}

template <class Message>
std::uint64_t hash_to_240(const Message& m) {
  const std::size_t size = m.size();
  std::uint64_t sum = size * kPrime64_1;
  for (std::size_t i = 0; i < 8; ++i) sum += mix16(m, 16 * i, 16 * i);
  // The tail reads the secret askew, so that a 16-byte unit is never mixed with one key twice.
  std::uint64_t tail = mix16(m, size - 16, 136 - 17);
  for (std::size_t i = 8; i < size / 16; ++i) tail += mix16(m, 16 * i, 16 * (i - 8) + 3);
  return avalanche(avalanche(sum) + tail);
}

using Lanes = std::array<std::uint64_t, 8>;

inline void accumulate(Lanes& lanes, const std::uint8_t* stripe, std::size_t secret) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::uint64_t data = load64(stripe + 8 * i);
    const std::uint64_t key = data ^ secret64(secret + 8 * i);
    lanes[i ^ 1] += data;
    lanes[i] += (key & 0xFFFFFFFFU) * (key >> 32);
  }
}

inline void scramble(Lanes& lanes) {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ secret64(kSecret.size() - kStripe + 8 * i)) *
               kPrime32_1;
  }
}

template <class Message>
std::uint64_t hash_long(const Message& m) {
  std::array<std::uint8_t, kStripe> scratch;
  Lanes lanes = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const std::size_t size = m.size();
  const std::size_t stripes = (size - 1) / kStripe;  // the last 64 bytes are taken apart
  for (std::size_t i = 0; i < stripes; ++i) {
    const std::size_t in_block = i % kStripesPerBlock;
    accumulate(lanes, m.stripe(kStripe * i, scratch.data()), kSecretStep * in_block);
    if (in_block == kStripesPerBlock - 1) scramble(lanes);
  }
  accumulate(lanes, m.stripe(size - kStripe, scratch.data()), kSecret.size() - kStripe - 7);
  std::uint64_t sum = size * kPrime64_1;
  for (std::size_t i = 0; i < 4; ++i) {
    sum += fold(lanes[2 * i] ^ secret64(11 + 16 * i), lanes[2 * i + 1] ^ secret64(19 + 16 * i));
  }
  return avalanche(sum);
}

}  // namespace detail

// XXH3-64 of the message, seed 0.
template <class Message>
std::uint64_t hash(const Message& m) {
  if (m.size() <= 16) return detail::hash_to_16(m);
  if (m.size() <= 128) return detail::hash_to_128(m);
  if (m.size() <= 240) return detail::hash_to_240(m);
  return detail::hash_long(m);
}

}  // namespace kv::xxh3
