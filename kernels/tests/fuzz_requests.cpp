// Hostile bodies: any bytes are read as a plain request or left, within their bounds, and read
// twice alike. That what is read is right, `tests/router/test_plain_scan.py` sees to. For
// libFuzzer; tests/kernels/test_request_fuzz.py builds it with the address and undefined-behaviour
// sanitizers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "json_reader.h"
#include "request_scan.h"

namespace {

constexpr kv::RequestLimits kLimits{8, 4, 4, 16};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::optional<kv::RequestScan> scan(std::span<const std::uint8_t> body) {
  try {
    return std::optional<kv::RequestScan>(std::in_place, body, kLimits);
  } catch (const kv::Unusual&) {
    return std::nullopt;
  }
}

void check(const kv::RequestScan& found, std::size_t body_bytes) {
  const auto first = found.first();
  require(found.has_ids || first.size() <= body_bytes, "a text has grown");
  require(found.prompts > 0 || found.messages > 0, "a request asks nothing");
  require(found.prompts <= 4 && found.messages <= 8, "a limit was passed over");
  require(found.longest_tokens <= found.tokens, "the longest prompt is longer than all");
  require(found.longest_tokens >= first.size() / 4, "the first prompt is longer than the longest");
  for (const std::size_t block_size : {std::size_t{1}, std::size_t{3}, std::size_t{16}}) {
    std::vector<std::uint64_t> chain(found.blocks(block_size));
    found.chain(block_size, 7, chain.data());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Of their own, so that a byte read behind them is seen.
  const std::unique_ptr<std::uint8_t[]> copy(new std::uint8_t[size]);
  std::copy(data, data + size, copy.get());
  const auto found = scan({copy.get(), size});
  const auto again = scan({data, size});
  require(found.has_value() == again.has_value(), "the same bytes are read and left");
  if (!found) return 0;
  check(*found, size);
  const auto one = found->first();
  const auto other = again->first();
  require(std::equal(one.begin(), one.end(), other.begin(), other.end()), "read otherwise");
  return 0;
}
