// Hostile heads: what is read as plain is the whole text, line for line, with nothing in it that
// another reader could take for an end. That it is what the door's Python reads,
// `tests/router/http/test_plain_head.py` sees to. For libFuzzer; tests/kernels/fuzz/test_heads.py
// builds it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "request/request_head.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

bool harmless(std::string_view text) {
  return text.find_first_of(std::string_view("\r\n\0", 3)) == std::string_view::npos;
}

void check(const kv::PlainHead& head, std::string_view text) {
  require(text.find("\r\n\r\n") == text.size() - 4, "the head's end is not the text's");
  const std::string line =
      std::string(head.method) + " " + std::string(head.target) + " HTTP/1.1\r\n";
  require(text.starts_with(line) && harmless(head.target), "another request line");
  std::size_t at = line.size(), lengths = 0, hosts = 0;
  for (const kv::HeadField& field : head.fields) {
    const std::size_t end = text.find("\r\n", at);
    const std::string_view whole = text.substr(at, end - at);
    require(whole.substr(0, whole.find(':')) == field.name, "another name");
    require(field.value.data() > whole.data() + field.name.size() &&
                field.value.data() + field.value.size() <= whole.data() + whole.size(),
            "a value from elsewhere");
    require(harmless(whole) && !field.name.empty(), "a line's end within a line");
    require(head.get(field.name).has_value(), "a name that cannot be found");
    std::string lower(field.name);
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    lengths += lower == "content-length" ? 1 : 0;
    hosts += lower == "host" ? 1 : 0;
    require(lower != "transfer-encoding" && lower != "expect", "an unusual head");
    at = end + 2;
  }
  require(at + 2 == text.size(), "a line was left out");
  require(hosts == 1 && lengths <= 1 && (lengths == 1 || head.length == 0), "two framings");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Of their own, so that a byte read behind them is seen.
  const std::unique_ptr<char[]> copy(new char[size]);
  std::copy(data, data + size, copy.get());
  const std::string_view text(copy.get(), size);
  if (const auto head = kv::read_plain_head(text)) check(*head, text);
  return 0;
}
