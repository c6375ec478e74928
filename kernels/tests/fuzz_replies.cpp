// Hostile replies: any bytes, cut anywhere, are a reply or a fault, and the verdict does not depend
// on the cuts. For libFuzzer: the first byte says how long the pieces are, and whether an answer is
// looked for in them.
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
  bool begun = false, refuses = false;
  std::uint64_t events = 0;
  std::string usage, held, flaw;

  bool operator==(const Verdict&) const = default;
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

Verdict judge(std::string_view data, std::size_t step, bool head_request, bool judged) {
  static const kv::relay::Limits limits{8, 1.0, 300, 40, 100, 1.0, 64, 0.05};
  // Where the bound counts, it does so between two pieces.
  static const kv::relay::Limits roomy{8, 1.0, 300, 40, 1 << 24, 1.0, 64, 0.05};
  static const kv::relay::ClientTerms client{"X-Ours: 1\r\n", true};
  kv::answer::Due due;
  if (judged) due.form = kv::answer::Form::completions;
  kv::relay::Reply reply(judged ? roomy : limits, head_request, client, nullptr, 0, due);
  Verdict verdict;
  std::size_t in = 0, out = 0;
  try {
    while (!data.empty() && !reply.done()) {
      const std::string piece(data.substr(0, step));  // its own memory: reads beyond it are seen
      data.remove_prefix(piece.size());
      reply.feed(piece);
      in += piece.size();
      out += reply.forward().size();
      require(out <= in + 300, "more came out than went in");
      require(!reply.withholds() || out == 0, "a reply leaks that is withheld");
      require(!reply.held() || reply.forward().empty(), "a held reply leaks");
    }
  } catch (const kv::relay::Broken& broken) {
    verdict.fault = broken.what();
    return verdict;  // what was seen before it depends on the cuts
  }
  verdict.head = reply.head_for_client();
  verdict.status = reply.status();
  verdict.done = reply.done();
  if (!reply.failed()) {  // of what failed nobody asks for the account
    verdict.events = reply.meter().events();
    verdict.usage = reply.meter().usage();
  }
  verdict.held = reply.held_body();
  verdict.begun = reply.begun();
  verdict.refuses = reply.refuses();
  verdict.flaw = reply.flaw();
  return verdict;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const bool head_request = (data[0] & 128) != 0, judged = (data[0] & 64) != 0;
  const Verdict whole = judge(text, text.size() + 1, head_request, judged);
  const Verdict pieces = judge(text, 1 + (data[0] & 15), head_request, judged);
  require(whole.fault.empty() == pieces.fault.empty(), "the verdict depends on the cuts");
  if (whole.fault.empty()) require(whole == pieces, "the account depends on the cuts");
  return 0;
}
