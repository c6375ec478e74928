// Hostile streams: any bytes are read as events in whatever pieces they come, the client's bytes
// and what is kept do not depend on the cuts, and of ids the client gets what a plain search leaves
// it. For libFuzzer: the first byte says how long the pieces are, and which form ids have.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "relay/journal.h"

namespace {

using kv::relay::Journal;
using kv::relay::JournalTerms;
using kv::relay::TokenRoom;

struct Verdict {
  std::string out, prefix, unfit, failure;
  std::vector<std::int32_t> prompt, said;
  bool finished = false, complete = false, miscounted = false, opened = false, counted = false;

  bool operator==(const Verdict&) const = default;
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

Verdict judge(std::string_view data, std::size_t step, const std::string& hidden) {
  auto room = std::make_shared<TokenRoom>(20, 30);
  Verdict verdict;
  {
    Journal journal(std::make_shared<JournalTerms>(JournalTerms{room, hidden, ""}));
    while (!data.empty() && !journal.failure()) {
      const std::string piece(data.substr(0, step));  // its own memory: reads beyond it are seen
      data.remove_prefix(piece.size());
      journal.feed(piece, verdict.out);
      const auto kept = static_cast<std::int64_t>(journal.prompt().size() + journal.said().size());
      require(room->taken() == kept && kept <= 20, "the room is not what is kept");
    }
    if (!journal.failure()) journal.flush(verdict.out);
    verdict.prefix = journal.prefix();
    verdict.unfit = journal.unfit();
    verdict.failure = journal.failure().message;
    verdict.prompt = journal.prompt();
    verdict.said = journal.said();
    verdict.finished = journal.finished();
    verdict.complete = journal.complete();
    verdict.miscounted = journal.miscounted();
    verdict.opened = journal.opened();
    verdict.counted = journal.usage_sent();
  }
  require(room->taken() == 0, "room is left taken");
  return verdict;
}

// Bytes of a field of token ids that the text begins with, 0 for none:
// ,"(prompt_)?token_ids":(null|\[[^\]]*\]), by hand, for std::regex takes half a minute to compile.
std::size_t ids_at_start(std::string_view text) {
  for (const std::string_view name : {",\"token_ids\":", ",\"prompt_token_ids\":"}) {
    if (!text.starts_with(name)) continue;
    const std::string_view value = text.substr(name.size());
    if (value.starts_with("null")) return name.size() + 4;
    const std::size_t end = value.starts_with('[') ? value.find(']') : std::string_view::npos;
    return end == std::string_view::npos ? 0 : name.size() + end + 1;
  }
  return 0;
}

void check_cut(std::string_view text) {
  std::string cut, left;
  kv::relay::append_without_ids(text, "", cut);
  while (!text.empty()) {
    const std::size_t ids = ids_at_start(text);
    if (ids == 0) left += text.front();
    text.remove_prefix(ids == 0 ? 1 : ids);
  }
  require(cut == left, "another cut than the search's");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string hidden = (data[0] & 128) != 0 ? "null" : "";
  const Verdict whole = judge(text, text.size() + 1, hidden);
  require(whole == judge(text, 1 + (data[0] & 63), hidden), "the account depends on the cuts");
  check_cut(text);
  return 0;
}
