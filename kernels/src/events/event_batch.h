// One decoded batch of an engine's KV events. `tests/oracles/event_batch.py` says what each part
// means and where the formats come from; both refuse the same payloads in the same words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kv {

// Where a piece of a batch's text lies.
struct Piece {
  std::uint32_t at = 0;
  std::uint32_t size = 0;
};

// Why an event is skipped. `kSkipNames` has their names, in the same order.
enum class Skip : std::uint8_t {
  type, hashes, tokens, token_count, block_size, medium, extra_keys, field, limit,
  never_removed
};

// What a cache group keeps of a prompt: every block; those in a sliding window; one state.
enum class CacheKind : std::uint8_t { untold, full, window, state, other };

inline constexpr std::array<std::string_view, 5> kCacheNames = {
    "", "full", "window", "state", "other"};

inline constexpr std::array<std::string_view, 10> kSkipNames = {
    "unknown_type", "bad_hashes", "bad_tokens", "token_count", "bad_block_size",
    "unknown_medium", "bad_extra_keys", "bad_field", "over_limit",
    "never_removed"};

using Skips = std::array<std::uint64_t, kSkipNames.size()>;

struct Event {
  enum class Kind : std::uint8_t { stored, removed, cleared };

  Kind kind = Kind::cleared;
  std::uint8_t tier = 0;  // 0 gpu, 1 host, 2 disk
  bool has_parent = false;
  bool has_lora = false;
  bool has_salt = false;
  CacheKind cache = CacheKind::untold;
  bool masked = false;         // of a window or states: tokens of more blocks than those named
  bool has_extras = false;     // then one piece a block, from `extras_at` on
  bool is_wide = false;        // one of its tokens is beyond int32
  std::int32_t group = -1;     // cache group of a hybrid model; -1: none was told
  std::uint32_t window = 0;    // of a group with a sliding window, in tokens
  std::uint32_t block_size = 1;
  std::uint32_t names_at = 0;
  std::uint32_t names = 0;
  std::uint32_t tokens_at = 0;
  std::uint32_t tokens = 0;
  std::uint32_t extras_at = 0;
  std::uint64_t parent = 0;
  Piece lora;
  Piece salt;
};

// Lifetime: call to feed.
class EventBatch {
 public:
  static constexpr std::size_t kMaxPayloadBytes = 32U << 20;
  static constexpr std::size_t kMaxEvents = 1U << 16;  // of one batch, as the next three
  static constexpr std::size_t kMaxBlocks = 1U << 20;
  static constexpr std::size_t kMaxTokens = 1U << 23;
  static constexpr std::size_t kMaxExtraBytes = 1U << 22;
  static constexpr std::size_t kMaxHashBytes = 64;
  static constexpr std::uint32_t kMaxBlockSize = 1U << 16;
  static constexpr std::uint32_t kMaxRank = (1U << 16) - 1;
  static constexpr std::size_t kMaxMedia = 8;  // unknown ones that are named
  static constexpr std::size_t kMaxMediumBytes = 48;

  // Throws std::invalid_argument with the reason.
  explicit EventBatch(std::span<const std::uint8_t> payload);

  double ts_s() const { return ts_s_; }
  std::uint32_t rank() const { return rank_; }
  std::size_t skipped() const {
    return std::accumulate(skips_.begin(), skips_.end(), std::size_t{0});
  }
  const Skips& skips() const { return skips_; }

  // How many events each medium that is not known costs, by its name, in the order in which they
  // were met. Beyond the first few names all are counted under "".
  using Media = std::vector<std::pair<std::string, std::uint64_t>>;
  const Media& unknown_media() const { return unknown_media_; }
  std::size_t blocks() const { return blocks_; }
  // Whether it tells blocks of windows or states, and none of full attention.
  bool windows_alone() const { return has_windows_ && !has_full_; }
  std::span<const Event> events() const { return events_; }

  // Names of all events, one event's after the other's.
  std::span<const std::uint64_t> names() const { return names_; }
  std::span<const std::uint64_t> names(const Event& event) const {
    return names().subspan(event.names_at, event.names);
  }
  // Tokens of an event that is not wide; none of one that is.
  std::span<const std::int32_t> tokens(const Event& event) const {
    return event.is_wide ? std::span<const std::int32_t>()
                         : std::span(tokens_).subspan(event.tokens_at, event.tokens);
  }
  // Tokens of an event that is wide; none of one that is not.
  std::span<const std::int64_t> wide_tokens(const Event& event) const {
    return event.is_wide ? std::span(wide_).subspan(event.tokens_at, event.tokens)
                         : std::span<const std::int64_t>();
  }
  std::string_view text(Piece piece) const {
    return std::string_view(text_).substr(piece.at, piece.size);
  }
  std::string_view lora(const Event& event) const { return text(event.lora); }
  std::string_view salt(const Event& event) const { return text(event.salt); }

  // What block `block` of the event is hashed with besides its tokens.
  std::string_view extra(const Event& event, std::size_t block) const {
    return event.has_extras ? text(extras_[event.extras_at + block]) : std::string_view();
  }

 private:
  friend class EventReader;

  double ts_s_ = 0;
  std::uint32_t rank_ = 0;
  Skips skips_{};
  Media unknown_media_;
  std::size_t blocks_ = 0;
  bool has_windows_ = false;  // or states
  bool has_full_ = false;
  std::vector<Event> events_;
  std::vector<std::uint64_t> names_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int64_t> wide_;
  std::vector<Piece> extras_;
  std::string text_;
};

}  // namespace kv
