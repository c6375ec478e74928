#include "request/body_fields.h"

#include <algorithm>
#include <limits>

#include "base/json_reader.h"

namespace kv {
namespace {

struct TooDeep {};

bool is_ascii(const std::uint8_t* from, std::size_t size) {
  std::uint64_t all = 0;
  std::uint8_t rest = 0;
  for (; size >= 8; from += 8, size -= 8) {
    std::uint64_t bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    all |= bytes;
  }
  for (; size > 0; ++from, --size) rest |= *from;
  return ((all | rest) & 0x8080808080808080ULL) == 0;
}

// Whether a string is more than bytes to be copied.
struct Weighed {
  bool costly = false;

  void run(const std::uint8_t* from, std::size_t size) {
    costly = costly || !is_ascii(from, size);
  }
  void escaped(std::uint32_t) { costly = true; }
};

// The beginning of a key, long enough to tell names apart.
struct ShortKey {
  std::size_t longest;
  std::string text;

  void run(const std::uint8_t* from, std::size_t size) {
    if (text.size() > longest) return;  // it is no name any more
    text.append(reinterpret_cast<const char*>(from), std::min(size, longest + 1));
  }
  void escaped(std::uint32_t character) { run_utf8(*this, character); }
};

class Weighing {
 public:
  explicit Weighing(JsonReader& reader) : reader_(reader) {}

  std::int64_t values = 0;
  std::int64_t text_bytes = 0;

  void value(int depth) {
    if (depth > kBodyDepth) throw TooDeep{};
    ++values;
    switch (reader_.next()) {
      case '"': return text();
      case 'n': return reader_.word("null");
      case 't': return reader_.word("true");
      case 'f': return reader_.word("false");
      case '[':
        reader_.array([&] { value(depth + 1); });
        return;
      case '{':
        reader_.object([&] {
          text();
          reader_.expect(':');
          value(depth + 1);
        });
        return;
      default: reader_.skip_number();
    }
  }

 private:
  void text() {
    reader_.next();
    const std::uint8_t* from = reader_.at();
    Weighed sink;
    reader_.string(sink);
    if (sink.costly) text_bytes += reader_.at() - from;
  }

  JsonReader& reader_;
};

// One value of the body, whose items are weighed one by one where it is an array.
BodyField field_at(JsonReader& reader, const std::uint8_t* body) {
  BodyField field;
  const bool is_array = reader.next() == '[';
  field.begin = reader.at() - body;
  if (is_array) {
    field.values = 1;
    reader.array([&] {
      Weighing item(reader);
      item.value(3);
      ++field.items;
      field.values += item.values;
      field.text_bytes = std::max(field.text_bytes, item.text_bytes);
    });
  } else {
    Weighing whole(reader);
    whole.value(2);
    field.values = whole.values;
    field.text_bytes = whole.text_bytes;
  }
  field.end = reader.at() - body;
  return field;
}

// Whether the items of a JSON array are ids that fit into `Id`; `at`: where the last one begins.
template <class Id>
bool read_ids(std::span<const std::uint8_t> array, std::vector<Id>& ids, std::size_t& at) {
  JsonReader reader(array);
  try {
    reader.array([&] {
      reader.next();
      at = static_cast<std::size_t>(reader.at() - array.data());
      ids.push_back(static_cast<Id>(reader.integer(0, std::numeric_limits<Id>::max())));
    });
    reader.expect_end();
    return true;
  } catch (const Unusual&) {
    return false;
  }
}

}  // namespace

BodyFields::BodyFields(std::span<const std::uint8_t> body, std::span<const std::string> names)
    : fields(names.size()) {
  std::size_t longest = 0;
  for (const std::string& name : names) longest = std::max(longest, name.size());
  JsonReader reader(body);
  try {
    if (reader.next() != '{') {
      fault = BodyFault::kNoObject;
    } else {
      reader.object([&] {
        ShortKey key{longest, {}};
        reader.string(key);
        reader.expect(':');
        const BodyField field = field_at(reader, body.data());
        const auto name = std::find(names.begin(), names.end(), key.text);
        if (name != names.end()) fields[static_cast<std::size_t>(name - names.begin())] = field;
      });
      reader.expect_end();
    }
  } catch (const Unusual&) {
    fault = BodyFault::kMalformed;
  } catch (const TooDeep&) {
    fault = BodyFault::kTooDeep;
  }
  at = static_cast<std::size_t>(reader.at() - body.data());
}

std::optional<std::vector<std::int64_t>> json_items(std::span<const std::uint8_t> array,
                                                    std::size_t most) {
  std::vector<std::int64_t> found;
  JsonReader reader(array);
  try {
    reader.array([&] {
      if (found.size() == 2 * most) throw Unusual{};
      reader.next();
      found.push_back(reader.at() - array.data());
      Weighing(reader).value(1);
      found.push_back(reader.at() - array.data());
    });
    reader.expect_end();
  } catch (const Unusual&) {
    return std::nullopt;
  } catch (const TooDeep&) {
    return std::nullopt;
  }
  return found;
}

TokenIds token_ids(std::span<const std::uint8_t> array) {
  TokenIds found;
  found.all = read_ids(array, found.ids, found.at);
  if (!found.all) {  // again, so that ids that are plain are read by the shortest loop
    found.ids.clear();
    found.all = read_ids(array, found.wide, found.at);
  }
  return found;
}

std::optional<std::string> json_text(std::span<const std::uint8_t> text) {
  WholeText sink;
  sink.text.reserve(text.size());
  JsonReader reader(text);
  try {
    reader.string(sink);
    reader.expect_end();
  } catch (const Unusual&) {
    return std::nullopt;
  }
  return std::move(sink.text);
}

}  // namespace kv
