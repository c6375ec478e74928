// Hostile bodies: any bytes are read as a plain request or left, within their bounds, and read
// twice alike. That what is read is right, `tests/router/body/test_plain_scan.py` sees to. For
// libFuzzer; tests/kernels/fuzz/test_requests.py builds it with the address and undefined-behaviour
// sanitizers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json_reader.h"
#include "request/body_fields.h"
#include "request/request_scan.h"

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

// Fields lie within the body, and their items within them; a body that is plain has no fault.
void weigh(std::span<const std::uint8_t> body, bool is_plain) {
  const std::vector<std::string> names = {"prompt", "messages", "tools", "a"};
  const kv::BodyFields found(body, names);
  require(found.at <= body.size(), "read behind the body");
  require(!is_plain || found.fault == kv::BodyFault::kNone, "a plain body has a fault");
  if (found.fault != kv::BodyFault::kNone) return;
  for (const kv::BodyField& field : found.fields) {
    if (field.begin < 0) continue;
    const auto begin = static_cast<std::size_t>(field.begin);
    const auto end = static_cast<std::size_t>(field.end);
    require(begin < end && end < body.size(), "a field is not within the body");
    require(field.text_bytes <= field.end - field.begin, "more text than bytes");
    require(field.items < field.values, "more items than values");
    const auto value = body.subspan(begin, end - begin);
    const auto items = kv::json_items(value, static_cast<std::size_t>(field.items));
    require(items.has_value() == (value.front() == '['), "items of what is no array");
    require(!items || items->size() == 2 * static_cast<std::size_t>(field.items), "items lost");
    require(kv::json_text(value).has_value() == (value.front() == '"'), "a text was lost");
    const kv::TokenIds ids = kv::token_ids(value);
    require(ids.all || ids.at < value.size(), "no id behind the field");
    const std::size_t found_ids = ids.ids.size() + ids.wide.size();
    require(ids.ids.empty() || ids.wide.empty(), "ids of both widths");
    require(!ids.all || found_ids == static_cast<std::size_t>(field.items), "ids lost");
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
  weigh({copy.get(), size}, found.has_value());
  if (!found) return 0;
  check(*found, size);
  const auto one = found->first();
  const auto other = again->first();
  require(std::equal(one.begin(), one.end(), other.begin(), other.end()), "read otherwise");
  return 0;
}
