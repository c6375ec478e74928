// Whether a worker's reply of status 200 is an answer. It decides by evidence only: where a reply
// cannot be read, or says something that is not known here, it is one. No I/O; `tests/oracles` has
// the twin.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "answer/said.h"

namespace kv::answer {

// What a request's answer has to be.
enum class Form : std::uint8_t {
  none,         // anything: it is not judged
  completions,  // choices, as OpenAI's completions and chats, and vLLM's own API
  responses,    // OpenAI's
  messages,     // Anthropic's
  generate,     // SGLang's own API
  other,        // anything but nothing at all, a page for people or an error
};

struct Due {
  Form form = Form::none;
  bool tokens = true;  // at least one is asked for
};

// Reads a reply's body, as far as that takes. Lifetime: one reply.
class Judge {
 public:
  enum class Verdict : std::uint8_t { open, answer, failure };

  // `coded`: the body is compressed, say. `limit_bytes`: a body, or an event, that is longer has
  // something to say.
  void begin(Due due, bool event_stream, bool coded, std::size_t limit_bytes);

  // Notes the next bytes of the body, free of chunk framing; `last`: there are no more.
  void feed(std::string_view payload, bool last);

  Verdict verdict() const { return verdict_; }
  const char* why() const { return why_; }    // of a failure: what the reply is or does
  bool refuses() const { return refuses_; }   // the answer is an error that the client caused
  bool pings() const { return pings_; }       // what was read so far keeps the connection open
  bool streams() const { return shape_ == Shape::events; }

 private:
  enum class Shape : std::uint8_t { unknown, whole, events };

  void read_shape(std::string_view text, bool last);
  void read_whole(std::string_view text);
  bool is_short_error(std::string_view text) const;
  std::size_t read_events(std::string_view text, bool last);
  void read_line(std::string_view line);
  void end_event();
  void take_event(const Said& said);
  void end();
  void answer() { verdict_ = Verdict::answer; }
  void fail(const char* why);
  void error(const Said& said);

  Due due_;
  Verdict verdict_ = Verdict::answer;
  Shape shape_ = Shape::unknown;
  bool event_stream_ = false, coded_ = false;
  bool refuses_ = false, pings_ = false, has_data_ = false, events_ = false, opened_ = false;
  std::size_t limit_bytes_ = 0;
  const char* why_ = "";
  std::string text_;          // what was not read yet
  std::string name_, data_;   // of the event under way
  Said said_;                 // by all events so far
};

// Why a stream that began well failed after all: its last events say an error, or that the answer
// was given up; "" where they do not. `tail`: the end of its body.
const char* late_failure(std::string_view tail);

}  // namespace kv::answer
