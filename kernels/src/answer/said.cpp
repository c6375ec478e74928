#include "answer/said.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "base/json_reader.h"

namespace kv::answer {

namespace {

constexpr int kItemDepth = 4;  // of items within each other that are looked into

template <std::size_t N>
bool is_one_of(std::string_view word, const std::array<std::string_view, N>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Fields of a choice, of a message's parts and of an item that say nothing of the answer itself.
constexpr std::array<std::string_view, 10> kAboutChoice = {
    "index",   "stop_reason",    "matched_stop",           "native_finish_reason",  "seed",
    "prompt_token_ids", "content_filter_results", "content_filter_offsets", "prompt_filter_results",
    "prompt_index"};
constexpr std::array<std::string_view, 10> kAboutItem = {
    "type", "id", "status", "role", "annotations", "index", "name", "phase", "logprobs", "object"};
// Items that are vessels for text; all others, a call of a tool say, are content by themselves.
constexpr std::array<std::string_view, 8> kVessels = {
    "message",      "reasoning",      "text",    "output_text",
    "summary_text", "reasoning_text", "refusal", "thinking"};
constexpr std::array<std::string_view, 9> kEvents = {
    "message_start",      "message_delta",      "message_stop", "content_block_start",
    "content_block_stop", "content_block_delta", "ping",        "error",
    "keepalive"};
// Reasons that an answer without a token does not have by itself.
constexpr std::array<std::string_view, 9> kPlainEnds = {
    "stop",       "length",     "end_turn",      "max_tokens", "eos",
    "eos_token", "stop_token", "stop_sequence", "completed"};
// Of an error's type or code, wherever in the word: it is the request that is wrong.
constexpr std::array<std::string_view, 16> kClients = {
    "invalid_request", "invalid_prompt", "BadRequest",    "bad_request",
    "not_found",       "NotFound",       "permission",    "PermissionDenied",
    "authentication",  "Authentication", "too_large",     "context_length",
    "content_policy",  "content_filter", "Unprocessable", "unsupported"};
// Statuses of 4xx that say nothing of the request itself.
constexpr std::array<std::int64_t, 4> kNotClients = {408, 425, 429, 499};

struct Plain {
  std::string_view text;

  void run(const std::uint8_t* from, std::size_t size) {
    text = {reinterpret_cast<const char*>(from), size};
  }
  void escaped(std::uint32_t) { throw Unusual{}; }
};

struct Filled {
  bool filled = false;

  void run(const std::uint8_t*, std::size_t) { filled = true; }
  void escaped(std::uint32_t) { filled = true; }
};

// What an error says of itself.
struct Error {
  bool there = false;
  std::int64_t code = 0;
  std::string_view type, name;  // its type, and a code that is a word

  bool is_clients() const {
    if (code != 0) {
      return code >= 400 && code < 500 &&
             std::find(kNotClients.begin(), kNotClients.end(), code) == kNotClients.end();
    }
    const auto names = [&](std::string_view word) {
      return type.find(word) != std::string_view::npos || name.find(word) != std::string_view::npos;
    };
    return std::any_of(kClients.begin(), kClients.end(), names);
  }
};

class SaidReader {
 public:
  SaidReader(std::string_view text, std::string_view event)
      : in_(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size())),
        event_(event) {}

  Said read() {
    Said said;
    if (in_.next() == '[') {
      in_.array([&] { said.add(object(1)); });
    } else {
      said = object(0);
    }
    in_.expect_end();
    return said;
  }

 private:
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

  // Takes any value; whether there is something in it. Numbers are something, false is nothing.
  bool something(int depth = 2) {
    switch (in_.next()) {
      case '"': {
        Filled sink;
        in_.string(sink);
        return sink.filled;
      }
      case 'n': in_.word("null"); return false;
      case 'f': in_.word("false"); return false;
      case '[': return in_.array([&] { in_.skip(depth + 1); });
      case '{': {
        bool filled = false;
        in_.object([&] {
          filled = true;
          key();
          in_.skip(depth + 1);
        });
        return filled;
      }
      default: in_.skip(depth); return true;
    }
  }

  // Takes any value; what it is where it is a string without escapes, else nothing.
  std::string_view word() {
    if (in_.next() == '"') return plain();
    in_.skip(2);
    return {};
  }

  // One value of an answer: all of it, or an event of its stream.
  Said object(int depth) {
    Said said;
    Error flat;  // an error whose fields are the value's own
    std::string_view type;
    bool is_error = false;
    in_.object([&] {
      const std::string_view name = key();
      said.any = true;
      if (name == "choices") {
        said.known = true;
        if (!in_.accept_null()) said.chosen |= in_.array([&] { choice(said); });
      } else if (name == "usage") {
        usage(said);
      } else if (name == "error") {
        error(said);
      } else if (name == "object") {
        is_error = word() == "error";
      } else if (name == "type") {
        type = flat.type = word();
      } else if (name == "code") {
        code(flat);
      } else if (name == "id" || name == "created" || name == "model") {
        in_.skip(1);
      } else {
        rest(said, name, depth);
      }
    });
    of_type(said, type.empty() ? event_ : type, flat);
    if (is_error) fail(said, flat);
    return said;
  }

  // The fields that an answer of completions and chats has not got.
  void rest(Said& said, std::string_view name, int depth) {
    if (name == "delta") {
      delta(said);
    } else if (name == "content" || name == "output") {
      said.chosen = said.known = true;
      said.content |= parts(0);
    } else if (name == "content_block" || name == "item" || name == "part") {
      said.content |= item(0);
    } else if (name == "response" && depth == 0 && in_.next() == '{') {
      Said inner = object(1);
      inner.waits = false;  // its stream goes on
      said.add(inner);
    } else if (name == "status") {
      status(said);
    } else if (name == "stop_reason" || name == "finish_reason") {
      finish(said);
    } else if (name == "text" || name == "text_output" || name == "output_ids" ||
               name == "token_ids") {
      said.known = said.chosen = true;
      said.content |= something();
    } else if (name == "meta_info") {
      meta(said);
    } else {
      in_.skip(1);
    }
  }

  // What a kind of event says by its name; `flat`: an error's fields, where it is one.
  void of_type(Said& said, std::string_view type, const Error& flat) {
    if (type.empty()) return;
    if (type == "error") {
      if (!said.failed) fail(said, flat);
    } else if (type == "ping" || type == "keepalive") {
      said.pings = true;
    } else if (type == "message_stop") {
      said.done = true;
    } else if (type == "response.failed" || type == "response.cancelled") {
      if (!said.failed) fail(said, {});
    } else if (type == "response.completed" || type == "response.incomplete") {
      said.ends = true;
    } else if (type == "message_start" || type == "response.created" ||
               type == "response.in_progress" || type == "response.queued") {
      said = Said{};  // its counts and outputs are of what is to come
      said.any = true;
    }
    said.known = true;
    said.strange = !type.starts_with("response.") && !is_one_of(type, kEvents);
  }

  void choice(Said& said) {
    in_.object([&] {
      const std::string_view name = key();
      if (name == "text") {
        said.content |= something();
      } else if (name == "delta" || name == "message") {
        message(said);
      } else if (name == "finish_reason") {
        finish(said);
      } else if (is_one_of(name, kAboutChoice)) {
        in_.skip(3);
      } else {
        said.content |= something(3);
      }
    });
  }

  // What the assistant says, or a part of it: anything but who speaks is content.
  void message(Said& said) {
    if (in_.accept_null()) return;
    in_.object([&] {
      if (key() == "role") {
        in_.skip(4);
      } else {
        said.content |= something(4);
      }
    });
  }

  // An event's text, or its object: of a message it may have the reason of its end.
  void delta(Said& said) {
    if (in_.next() != '{') {
      said.content |= something();
      return;
    }
    in_.object([&] {
      const std::string_view name = key();
      if (name == "stop_reason") {
        finish(said);
      } else if (name == "type" || name == "stop_sequence" || name == "usage" || name == "role") {
        in_.skip(2);
      } else {
        said.content |= something();
      }
    });
  }

  // Whether text, or an array of items, has content.
  bool parts(int depth) {
    if (in_.next() != '[') return something();
    bool content = false;
    in_.array([&] { content |= item(depth); });
    return content;
  }

  bool item(int depth) {
    if (in_.next() != '{' || depth == kItemDepth) return something();
    bool content = false;
    in_.object([&] {
      const std::string_view name = key();
      if (name == "type") {
        const std::string_view type = word();
        content |= !type.empty() && !is_one_of(type, kVessels);
      } else if (name == "content" || name == "summary") {
        content |= parts(depth + 1);
      } else if (is_one_of(name, kAboutItem)) {
        in_.skip(2);
      } else {
        content |= something();
      }
    });
    return content;
  }

  // A reason of an answer's end: a word, or SGLang's object.
  void finish(Said& said) {
    std::string_view why;
    Error error;
    if (in_.next() == '{') {
      in_.object([&] {
        const std::string_view name = key();
        if (name == "type") {
          why = word();
        } else if (name == "status_code") {
          code(error);
        } else {
          in_.skip(3);
        }
      });
    } else if (in_.next() == '"') {
      why = plain();
    } else {
      in_.skip(2);
    }
    if (why.empty()) return;
    said.known = true;
    if (why != "abort" && why != "error") {
      said.ends = true;
      said.filtered |= !is_one_of(why, kPlainEnds);
    } else if (error.is_clients()) {
      fail(said, error);
    } else {
      said.given_up = true;
    }
  }

  void status(Said& said) {
    const std::string_view what = word();
    if (what == "completed" || what == "incomplete") {
      said.ends = true;
    } else if (what == "failed" || what == "cancelled") {
      if (!said.failed) fail(said, {});
    } else if (what == "queued" || what == "in_progress") {
      said.waits = true;
    }
  }

  void meta(Said& said) {
    said.known = true;
    if (in_.next() != '{') {
      in_.skip(1);
      return;
    }
    in_.object([&] {
      const std::string_view name = key();
      if (name == "finish_reason") {
        finish(said);
      } else if (name == "completion_tokens") {
        count(said);
      } else {
        in_.skip(2);
      }
    });
  }

  void usage(Said& said) {
    if (in_.next() != '{') {
      in_.skip(1);
      return;
    }
    in_.object([&] {
      const std::string_view name = key();
      if (name == "completion_tokens" || name == "output_tokens") {
        count(said);
      } else {
        in_.skip(2);
      }
    });
  }

  void count(Said& said) {
    const std::uint8_t next = in_.next();
    if (next < '0' || next > '9') {
      in_.skip(2);
      return;
    }
    said.counted = true;
    said.tokens |= in_.number().text.find_first_of("123456789") != std::string_view::npos;
  }

  void error(Said& said) {
    if (in_.next() != '{') {
      if (something()) fail(said, {});
      return;
    }
    Error error;
    in_.object([&] {
      const std::string_view name = key();
      error.there = true;
      if (name == "code" || name == "status_code" || name == "status") {
        code(error);
      } else if (name == "type") {
        error.type = word();
      } else {
        in_.skip(2);
      }
    });
    if (error.there) fail(said, error);
  }

  // A status, as a number or as its digits, or a word.
  void code(Error& error) {
    const std::uint8_t next = in_.next();
    if (next == '"') {
      const std::string_view text = plain();
      const bool digits = text.size() == 3 && std::all_of(text.begin(), text.end(), [](char c) {
                            return c >= '0' && c <= '9';
                          });
      if (digits) {
        error.code = (text[0] - '0') * 100 + (text[1] - '0') * 10 + (text[2] - '0');
      } else {
        error.name = text;
      }
    } else if (next >= '0' && next <= '9') {
      const std::string_view digits = in_.number().text;
      error.code = digits.size() == 3 ? std::stoi(std::string(digits)) : 0;
    } else {
      in_.skip(2);
    }
  }

  static void fail(Said& said, const Error& error) {
    said.clients = said.failed ? said.clients && error.is_clients() : error.is_clients();
    said.failed = said.known = true;
  }

  JsonReader in_;
  std::string_view event_;
};

}  // namespace

void Said::add(const Said& more) {
  clients = failed && more.failed ? clients && more.clients : clients || more.clients;
  content |= more.content;
  ends |= more.ends;
  filtered |= more.filtered;
  given_up |= more.given_up;
  counted |= more.counted;
  tokens |= more.tokens;
  failed |= more.failed;
  waits |= more.waits;
  pings |= more.pings;
  done |= more.done;
  chosen |= more.chosen;
  known |= more.known;
  any |= more.any;
  strange |= more.strange;
}

Said said_by(std::string_view json, std::string_view event) {
  return SaidReader(json, event).read();
}

}  // namespace kv::answer
