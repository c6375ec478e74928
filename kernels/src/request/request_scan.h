// What routing needs of a plain inference request's body, in one pass over its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kv {

struct RequestLimits {
  std::int64_t messages;
  std::int64_t prompts;  // in one request
  std::int64_t choices;  // `n`
  std::int64_t key_bytes;  // of a session's name, a salt, a model's name
};

// Takes a body only where `router/body/scan.py` takes it too and reads the same from it; raises
// `Unusual` for any other, and for many that are rare. Lifetime: request.
class RequestScan {
 public:
  // The body must outlive this object: a prompt without escapes is hashed where it lies.
  RequestScan(std::span<const std::uint8_t> body, const RequestLimits& limits);

  std::optional<std::string> model;
  std::string session;  // empty: none
  std::string cache_key;  // empty: none
  std::string user;  // empty: none
  // Names and JSON values of what agents' clients say of themselves; the values lie in the body.
  std::vector<std::pair<std::string_view, std::string_view>> agent_fields;
  std::string cache_salt;  // empty: none
  bool stream = false;
  std::int64_t priority = 0;
  std::optional<std::int64_t> max_output_tokens;
  std::size_t prompts = 0;
  std::size_t messages = 0;
  bool has_ids = false;  // the prompt came as token ids, else as text
  std::size_t tokens = 0;  // of all prompts, each with one at least; of text a quarter of its bytes
  std::size_t longest_tokens = 0;

  // Chain hashes of the first prompt, or of the conversation where there is no prompt.
  std::size_t blocks(std::size_t block_size) const { return first_tokens() / block_size; }
  void chain(std::size_t block_size, std::uint64_t seed, std::uint64_t* chain) const;

  // The bytes that stand for the first prompt's tokens, four for each.
  std::span<const std::uint8_t> first() const;

 private:
  friend class RequestFields;

  std::size_t first_tokens() const { return has_ids ? ids_.size() : text_.size() / 4; }
  void count(std::size_t prompt_tokens);

  std::vector<std::int32_t> ids_;
  std::span<const std::uint8_t> text_;  // within the body, or within `written_`
  std::unique_ptr<std::uint8_t[]> written_;
};

}  // namespace kv
