// What one JSON value of a worker's answer says, whichever API it is of: OpenAI's completions,
// chats and responses, Anthropic's messages, SGLang's and Triton's own. No I/O.
#pragma once

#include <string_view>

namespace kv::answer {

// Flags of several values are joined by `add`: an array of answers, the events of a stream.
struct Said {
  bool content = false;   // a part of an answer: text, a tool call, reasoning, token ids
  bool ends = false;      // a reason why the answer ended
  bool filtered = false;  // that reason lets an answer have no token
  bool given_up = false;  // the reason is that the engine could not finish it
  bool counted = false;   // how many tokens the answer has
  bool tokens = false;    // more than none
  bool failed = false;    // an error
  bool clients = false;   // the error is the client's own: another worker would say the same
  bool waits = false;     // the answer is to be asked for later
  bool pings = false;     // it only keeps the connection open
  bool done = false;      // nothing is to follow
  bool chosen = false;    // it has a choice, an output or a content, be they empty
  bool known = false;     // it has fields of an answer, or a type of event, that are known here
  bool any = false;       // it has a field at all
  bool strange = false;   // its type is of no event that is known here

  void add(const Said& more);
};

// What JSON says; `event`: the name of the event that it came in, for JSON without a type of its
// own. Throws `Unusual` for what is no JSON, and for JSON out of the ordinary.
Said said_by(std::string_view json, std::string_view event = {});

}  // namespace kv::answer
