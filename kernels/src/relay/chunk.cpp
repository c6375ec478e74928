#include "relay/chunk.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "base/json_reader.h"

namespace kv::relay {

namespace {

constexpr std::int64_t kMaxIndex = 1'000'000;
constexpr std::size_t kMaxDigits = 18;
constexpr std::size_t kMaxDeltaKeys = 16;

bool is_nothing(std::string_view raw) { return raw == "null" || raw == "[]" || raw == "\"\""; }

// A string that has no escapes.
struct Plain {
  std::string_view text;

  void run(const std::uint8_t* from, std::size_t size) {
    text = {reinterpret_cast<const char*>(from), size};
  }
  void escaped(std::uint32_t) { throw Unusual{}; }
};

// Whether a string has anything in it.
struct Filled {
  bool filled = false;

  void run(const std::uint8_t*, std::size_t) { filled = true; }
  void escaped(std::uint32_t) { filled = true; }
};

class ChunkReader {
 public:
  explicit ChunkReader(std::string_view text)
      : in_(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size())) {}

  Chunk read() {
    Chunk chunk;
    unsigned seen = 0;
    in_.object([&] {
      const std::string_view name = key();
      if (name == "choices") {
        once(seen, 1);
        choices(chunk);
      } else if (name == "usage") {
        once(seen, 2);
        chunk.counted = !in_.accept_null();
        if (chunk.counted) chunk.answer_tokens = integer_at("completion_tokens");
      } else if (name == "prompt_token_ids") {
        once(seen, 4);
        chunk.prompt = ids();
      } else if (name == "error") {
        once(seen, 8);
        chunk.failed = !in_.accept_null();
        if (chunk.failed) chunk.error_code = integer_at("code");
      } else {
        in_.skip(1);
      }
    });
    in_.expect_end();
    return chunk;
  }

 private:
  static void once(unsigned& seen, unsigned bit) {
    if ((seen & bit) != 0) throw Unusual{};
    seen |= bit;
  }

  std::string_view plain() {
    Plain sink;
    in_.string(sink);
    return sink.text;
  }

  std::string_view key() {
    const std::string_view name = plain();
    in_.expect(':');
    return name;
  }

  void choices(Chunk& chunk) {
    in_.array([&] {
      Choice choice = read_choice();
      if (chunk.choices++ == 0) chunk.first = std::move(choice);
    });
  }

  Choice read_choice() {
    Choice choice;
    bool text = false, delta = false;
    unsigned seen = 0;
    in_.object([&] {
      const std::string_view name = key();
      if (name == "index") {
        once(seen, 1);
        choice.index = in_.integer(0, kMaxIndex);
      } else if (name == "text") {
        once(seen, 2);
        text = filled();
      } else if (name == "delta") {
        once(seen, 4);
        delta = !in_.accept_null();
        if (delta) read_delta(choice);
      } else if (name == "finish_reason") {
        once(seen, 8);
        choice.ends = !in_.accept_null();
        if (choice.ends) {
          const std::string_view why = plain();
          choice.given_up = why == "abort" || why == "error";
        }
      } else if (name == "token_ids") {
        once(seen, 16);
        if (auto given = ids()) choice.ids = std::move(*given);
      } else if (name == "prompt_token_ids") {
        once(seen, 32);
        choice.prompt = ids();
      } else {
        in_.skip(3);
      }
    });
    if (!delta) choice.says = text;
    return choice;
  }

  void read_delta(Choice& choice) {
    std::array<std::string_view, kMaxDeltaKeys> names;
    std::size_t count = 0;
    in_.object([&] {
      const std::string_view name = key();
      const auto stop = names.begin() + static_cast<std::ptrdiff_t>(count);
      if (count == names.size() || std::find(names.begin(), stop, name) != stop) throw Unusual{};
      names[count++] = name;
      in_.next();
      const std::uint8_t* from = in_.at();
      in_.skip(4);
      const bool something = !is_nothing(
          {reinterpret_cast<const char*>(from), static_cast<std::size_t>(in_.at() - from)});
      if (name == "content") {
        choice.says = something;
      } else if (name == "role") {
        choice.opens = true;
      } else {
        choice.parsed = choice.parsed || something;
      }
    });
  }

  bool filled() {
    if (in_.accept_null()) return false;
    Filled sink;
    in_.string(sink);
    return sink.filled;
  }

  std::optional<std::vector<std::int32_t>> ids() {
    if (in_.accept_null()) return std::nullopt;
    std::vector<std::int32_t> given;
    in_.array([&] {
      given.push_back(static_cast<std::int32_t>(
          in_.integer(0, std::numeric_limits<std::int32_t>::max())));
    });
    return given;
  }

  // The integer of this name in the object that follows; none where there is no such thing.
  std::optional<std::int64_t> integer_at(std::string_view wanted) {
    std::optional<std::int64_t> found;
    if (in_.next() != '{') {
      in_.skip(1);
      return found;
    }
    unsigned seen = 0;
    in_.object([&] {
      if (key() != wanted) {
        in_.skip(2);
        return;
      }
      once(seen, 1);
      const std::uint8_t next = in_.next();
      if (next == '-' || (next >= '0' && next <= '9')) {
        const JsonReader::Number number = in_.number();
        if (number.text.size() > kMaxDigits) throw Unusual{};
        if (number.is_integer) found = std::stoll(std::string(number.text));
      } else if (next == 't' || next == 'f') {
        found = in_.boolean() ? 1 : 0;  // as Python counts them
      } else {
        in_.skip(2);
      }
    });
    return found;
  }

  JsonReader in_;
};

// Where the value of a field of ids ends, npos where it has another kind of value.
std::size_t end_of_ids(std::string_view text, std::size_t at) {
  if (text.substr(at).starts_with("null")) return at + 4;
  if (at == text.size() || text[at] != '[') return std::string_view::npos;
  const std::size_t bracket = text.find(']', at);
  return bracket == std::string_view::npos ? bracket : bracket + 1;
}

}  // namespace

std::optional<Chunk> read_chunk(std::string_view data) {
  try {
    return ChunkReader(data).read();
  } catch (const Unusual&) {
    return std::nullopt;
  }
}

void append_without_ids(std::string_view event, std::string_view hidden, std::string& out) {
  // Quotes inside of JSON strings are escaped, so this can only be a key.
  constexpr std::string_view kKey = "token_ids\":", kPrompt = "\"prompt_";
  std::size_t done = 0;
  for (std::size_t at = event.find(kKey); at != std::string_view::npos;
       at = event.find(kKey, at)) {
    const std::size_t value = at + kKey.size();
    const std::string_view before = event.substr(done, at - done);
    const std::size_t quoted = before.ends_with(kPrompt) ? kPrompt.size() : 1;
    const std::size_t comma = hidden.empty() ? 1 : 0;
    const std::size_t stop = end_of_ids(event, value);
    const bool is_key = before.size() >= quoted + comma && event[at - quoted] == '"' &&
                        (comma == 0 || event[at - quoted - 1] == ',');
    if (!is_key || stop == std::string_view::npos) {
      at = value;
      continue;
    }
    out.append(event.substr(done, at - quoted - comma - done));
    if (comma == 0) out.append(event.substr(at - quoted, value - at + quoted)).append(hidden);
    done = at = stop;
  }
  out.append(event.substr(done));
}

}  // namespace kv::relay
