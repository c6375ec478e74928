// Hostile replies: any bytes, cut anywhere, are a reply or a fault, and the verdict does not depend
// on the cuts. For libFuzzer: the first byte says how long the pieces are.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "relay/reply.h"

namespace {

struct Verdict {
  std::string fault, head;
  int status = 0;
  bool done = false;
  std::uint64_t events = 0;
  std::string usage, held;

  bool operator==(const Verdict&) const = default;
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

Verdict judge(std::string_view data, std::size_t step, bool head_request) {
  static const kv::relay::Limits limits{8, 1.0, 300, 40, 100, 1.0, 64, 0.05};
  static const kv::relay::ClientTerms client{"X-Ours: 1\r\n", true};
  kv::relay::Reply reply(limits, head_request, client);
  Verdict verdict;
  try {
    while (!data.empty() && !reply.done()) {
      const std::string piece(data.substr(0, step));  // its own memory: reads beyond it are seen
      data.remove_prefix(piece.size());
      reply.feed(piece);
      require(reply.forward().size() <= piece.size() + 300, "more came out than went in");
      require(!reply.held() || reply.forward().empty(), "a held reply leaks");
    }
  } catch (const kv::relay::Broken& broken) {
    verdict.fault = broken.what();
    return verdict;  // what was seen before it depends on the cuts
  }
  verdict.head = reply.head_for_client();
  verdict.status = reply.status();
  verdict.done = reply.done();
  verdict.events = reply.meter().events();
  verdict.usage = reply.meter().usage();
  verdict.held = reply.held_body();
  return verdict;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Verdict whole = judge(text, text.size() + 1, (data[0] & 128) != 0);
  const Verdict pieces = judge(text, 1 + (data[0] & 15), (data[0] & 128) != 0);
  require(whole.fault.empty() == pieces.fault.empty(), "the verdict depends on the cuts");
  if (whole.fault.empty()) require(whole == pieces, "the account depends on the cuts");
  return 0;
}
