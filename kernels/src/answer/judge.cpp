#include "answer/judge.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/json_reader.h"

namespace kv::answer {

namespace {

constexpr std::string_view kBlank = " \t\r\n";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::string_view kData = "data";
constexpr std::string_view kEvent = "event";
constexpr std::string_view kDataField = "data:";
constexpr std::string_view kDone = "[DONE]";
constexpr int kLastEvents = 3;           // of a stream: why it ended, its usage, that it is over
constexpr std::size_t kFieldBytes = 6;   // of the longest name of a field, with its colon
constexpr std::size_t kErrorBytes = 32;  // of a value, by which one that is an error is known

constexpr const char* kEmpty = "has no body";
constexpr const char* kPage = "is not JSON";
constexpr const char* kError = "is an error";
constexpr const char* kGivenUp = "was given up by the engine";
constexpr const char* kNothing = "says nothing";
constexpr const char* kNoTokens = "has no token";

std::string_view without_blanks(std::string_view text) {
  const std::size_t first = text.find_first_not_of(kBlank);
  return first == std::string_view::npos ? std::string_view() : text.substr(first);
}

std::string_view stripped(std::string_view text) {
  text = without_blanks(text);
  return text.substr(0, text.find_last_not_of(kBlank) + 1);
}

bool same_letters(std::string_view text, std::string_view lower) {
  return text.size() >= lower.size() &&
         std::equal(lower.begin(), lower.end(), text.begin(), [](char a, char b) {
           return (b >= 'A' && b <= 'Z' ? static_cast<char>(b + 32) : b) == a;
         });
}

bool is_page(std::string_view text) {
  return same_letters(text, "<!doctype") || same_letters(text, "<html") ||
         same_letters(text, "<head") || same_letters(text, "<?xml");
}

// Whether a line of an event stream begins so, as far as there is any.
bool is_field(std::string_view text) {
  for (const std::string_view field : {"data:", "event:", "id:", "retry:", ":"}) {
    if (text.substr(0, field.size()) == field.substr(0, text.size())) return true;
  }
  return false;
}

// Just after `part` in `text`; the rest of it, or nothing.
std::string_view after(std::string_view text, std::string_view part) {
  if (text.empty()) return {};  // it may have no address
  const void* found = ::memmem(text.data(), text.size(), part.data(), part.size());
  if (found == nullptr) return {};
  return text.substr(
      static_cast<std::size_t>(static_cast<const char*>(found) - text.data()) + part.size());
}

// Takes the last line off `text`, whose beginning is no whole line and is never one.
std::string_view last_line(std::string_view& text) {
  const void* found = ::memrchr(text.data(), '\n', text.size());
  if (found == nullptr) {
    text = {};
    return {};
  }
  const auto at = static_cast<std::size_t>(static_cast<const char*>(found) - text.data());
  const std::string_view line = text.substr(at + 1);
  text = text.substr(0, at);
  return line;
}

// What an event says of its stream's end, at a glance: that it ended well, nothing, or something
// that has to be read. It is looked at in every stream, so it is not parsed.
enum class End : std::uint8_t { unsaid, well, look };

End end_in(std::string_view data) {
  if (!after(data.substr(0, kErrorBytes), "\"error").empty()) return End::look;
  if (data.starts_with("{\"type\":\"response.")) return End::look;
  const std::string_view reason = without_blanks(after(data, "_reason\":"));
  if (reason.empty() || reason.starts_with("null")) {
    return after(data, "\"error\"").empty() ? End::unsaid : End::look;
  }
  return reason.starts_with("\"abort") || reason.starts_with("\"error") || reason[0] == '{'
             ? End::look
             : End::well;
}

}  // namespace

void Judge::begin(Due due, bool event_stream, bool coded, std::size_t limit_bytes) {
  due_ = due;
  event_stream_ = event_stream;
  coded_ = coded;
  limit_bytes_ = limit_bytes;
  verdict_ = due.form == Form::none ? Verdict::answer : Verdict::open;
}

void Judge::feed(std::string_view payload, bool last) {
  if (verdict_ != Verdict::open) return;
  if (coded_ && !payload.empty()) {
    answer();  // nobody can read it here
    return;
  }
  std::string_view text = payload;
  const bool carried = !text_.empty();
  if (carried) {
    text_.append(payload);
    text = text_;
  }
  if (shape_ == Shape::unknown) read_shape(text, last);
  std::size_t read = 0;
  if (shape_ == Shape::events) {
    read = read_events(text, last);
  } else if (text.size() > limit_bytes_) {
    answer();
  } else if (last && verdict_ == Verdict::open) {
    read_whole(text);
  }
  if (verdict_ != Verdict::open) {
    text_ = std::string();
    return;
  }
  if (carried) {
    text_.erase(0, read);
  } else {
    text_.assign(text.substr(read));
  }
  if (text_.size() + data_.size() > limit_bytes_) answer();
}

// By the first bytes of a body: servers have been seen to stream under another type, and to send
// one JSON object, an error as a rule, under that of a stream.
void Judge::read_shape(std::string_view text, bool last) {
  if (text.size() < kByteOrderMark.size() && kByteOrderMark.starts_with(text) && !last) return;
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const std::string_view begin = without_blanks(text);
  if (begin.empty()) {
    pings_ = pings_ || !text.empty();  // blanks come where a whole answer takes long
    return;
  }
  if (begin[0] == '{' || begin[0] == '[') {
    shape_ = Shape::whole;
  } else if (event_stream_) {
    shape_ = Shape::events;
  } else if (is_field(begin)) {
    if (begin.size() >= kFieldBytes || last) shape_ = Shape::events;
    return;
  } else if (due_.form != Form::other || is_page(begin)) {
    fail(kPage);
    return;
  } else if (begin[0] != '<' || begin.size() >= 9) {
    answer();
    return;
  }
  pings_ = false;
  if (shape_ == Shape::whole && due_.form == Form::other && !is_short_error(begin)) answer();
}

// Whether a body may be an error by how it begins; of other answers no more is looked at.
bool Judge::is_short_error(std::string_view text) const {
  std::string begin;
  for (const char c : text.substr(0, 2 * kErrorBytes)) {
    if (kBlank.find(c) == std::string_view::npos) begin.push_back(c);
  }
  for (const std::string_view error : {"{\"error\":", "{\"object\":\"error\""}) {
    if (std::string_view(begin).substr(0, error.size()) == error.substr(0, begin.size())) {
      return true;
    }
  }
  return false;
}

void Judge::read_whole(std::string_view text) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  text = stripped(text);
  if (text.empty()) {
    if (due_.form == Form::other && event_stream_) {
      answer();  // a model of Triton's may have no response
    } else {
      fail(kEmpty);
    }
    return;
  }
  Said said;
  if (due_.form == Form::other && !is_short_error(text)) {
    answer();
    return;
  }
  try {
    said = said_by(text);
  } catch (const Unusual&) {
    answer();
    return;
  }
  const bool generates = due_.form == Form::generate && said.any && !said.known;
  if (said.failed) {
    error(said);
  } else if (said.given_up) {
    fail(kGivenUp);
  } else if (due_.form == Form::completions && !said.chosen) {
    fail(kNothing);
  } else if (due_.form == Form::other || said.content || said.tokens || generates ||
             (said.waits && due_.form == Form::responses)) {
    answer();
  } else if (!said.chosen) {
    fail(kNothing);
  } else {
    said_ = said;
    events_ = true;
    end();
  }
}

// Takes the events that have come whole; how many bytes that are.
std::size_t Judge::read_events(std::string_view text, bool last) {
  std::size_t start = 0;
  while (verdict_ == Verdict::open) {
    const std::string_view rest = text.substr(start);
    const std::size_t feed = std::min(rest.find('\n'), rest.size());
    const std::size_t stop = std::min(rest.substr(0, feed).find('\r'), feed);
    if (stop == rest.size()) break;
    const bool returns = rest[stop] == '\r';
    if (returns && stop + 1 == rest.size() && !last) break;  // a line feed may follow
    read_line(rest.substr(0, stop));
    start += stop + (returns && stop + 1 == feed && feed < rest.size() ? 2 : 1);
  }
  if (last && verdict_ == Verdict::open) {
    if (start < text.size()) read_line(text.substr(start));
    end_event();
    if (verdict_ == Verdict::open) end();
  }
  return start;
}

void Judge::read_line(std::string_view line) {
  if (line.starts_with(kByteOrderMark)) line.remove_prefix(kByteOrderMark.size());
  if (line.empty()) {
    end_event();
    return;
  }
  if (line[0] == ':') {
    pings_ = true;
    return;
  }
  const std::size_t colon = line.find(':');
  const std::string_view field = line.substr(0, colon);
  std::string_view value = colon == std::string_view::npos ? "" : line.substr(colon + 1);
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (field == kData) {
    if (has_data_) data_.push_back('\n');
    has_data_ = true;
    data_.append(value);
  } else if (field == kEvent) {
    name_ = value;
  }
}

void Judge::end_event() {
  const std::string data = std::exchange(data_, {});
  const std::string name = std::exchange(name_, {});
  const bool has_data = std::exchange(has_data_, false);
  if (!has_data && name.empty()) return;
  const std::string_view text = stripped(data);
  events_ = events_ || has_data;
  if (text == kDone) {
    end();
    return;
  }
  Said said;
  if (text.empty()) {
    said.failed = name == "error";
    pings_ = pings_ || name == "ping";
  } else {
    try {
      said = said_by(text, name);
    } catch (const Unusual&) {
      answer();
      return;
    }
  }
  take_event(said);
}

void Judge::take_event(const Said& said) {
  const bool typed = due_.form == Form::responses || due_.form == Form::messages;
  const bool generates = due_.form == Form::generate && said.any && !said.known;
  pings_ = pings_ || said.pings;
  said_.add(said);
  if (said.failed) {
    error(said);
  } else if (said.given_up) {
    fail(kGivenUp);
  } else if (said.content || said.tokens || generates || (typed && said.strange) ||
             (due_.form == Form::other && said.any)) {
    answer();
  } else if (said.done) {
    end();
  } else {
    // The first one of a chat says who speaks; those of the other two tell of the request.
    pings_ = pings_ || typed || opened_;
    opened_ = true;
  }
}

// Nothing is to follow, and nothing was said.
void Judge::end() {
  if (!due_.tokens || due_.form == Form::other) {
    if (events_ || due_.form == Form::other) {
      answer();
    } else {
      fail(kNothing);
    }
  } else if (!said_.ends) {
    fail(kNothing);
  } else if (said_.counted && !said_.filtered) {
    fail(kNoTokens);
  } else {
    answer();
  }
}

void Judge::fail(const char* why) {
  verdict_ = Verdict::failure;
  why_ = why;
}

void Judge::error(const Said& said) {
  refuses_ = said.clients;
  if (refuses_) {
    answer();
  } else {
    fail(kError);
  }
}

const char* late_failure(std::string_view tail) {
  int events = 0;
  while (events < kLastEvents && !tail.empty()) {
    const std::string_view line = last_line(tail);
    if (!line.starts_with(kDataField)) continue;
    const std::string_view data = stripped(line.substr(kDataField.size()));
    if (data == kDone) continue;
    ++events;
    const End end = end_in(data);
    if (end == End::well) return "";
    if (end == End::unsaid) continue;
    try {
      const Said said = said_by(data);
      if (said.failed) return said.clients ? "" : kError;
      if (said.given_up) return kGivenUp;
    } catch (const Unusual&) {
      return "";
    }
  }
  return "";
}

}  // namespace kv::answer
