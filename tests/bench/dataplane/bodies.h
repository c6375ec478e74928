// Requests as the load sends them, head and body in one piece.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct BodyKind {
  std::size_t bytes;  // of the prompt as it stands in the body
  bool ids;           // token ids instead of text
  bool chat;          // one message of a user
  bool stream;
  long events;  // `max_tokens`
  int distinct;
  double shared;  // how much of each prompt, from its beginning, is that of all others
  bool session;   // a header names the session, one for each of the distinct prompts
  std::string words;  // text that prompts are cut from; empty: random letters
};

// Where a request has digits that make its prompt one of a kind from its first byte on.
struct Request {
  std::string bytes;
  std::size_t prompt_at;
};

namespace bodies {

// xorshift64*, Vigna 2016.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return std::uint32_t((state_ * 2'685'821'657'736'338'717u) >> 32);
  }

 private:
  std::uint64_t state_;
};

// Pieces of `words` of up to 256 bytes in a random order, else random letters.
inline std::string text(std::size_t bytes, std::uint64_t seed, const std::string& words) {
  Draws draws(seed);
  std::string text;
  while (!words.empty() && text.size() < bytes)
    text += words.substr(draws.next() % words.size(), 256);
  while (text.size() < bytes) {
    for (std::uint32_t left = 2 + draws.next() % 8; left > 0; --left)
      text += char('a' + draws.next() % 26);
    text += ' ';
  }
  text.resize(bytes);
  return text;
}

inline std::string ids(std::size_t bytes, std::uint64_t seed) {
  Draws draws(seed);
  std::string list;
  while (list.size() + 6 < bytes) list += std::to_string(10'000 + draws.next() % 90'000) + ",";
  return list;
}

inline std::vector<Request> make(const BodyKind& kind, const std::string& model) {
  const auto written = [&kind](std::size_t bytes, std::uint64_t seed) {
    return kind.ids ? ids(bytes, seed) : text(bytes, seed, kind.words);
  };
  const std::string shared = written(std::size_t(double(kind.bytes) * kind.shared), 1);
  std::vector<Request> requests;
  for (int i = 0; i < kind.distinct; ++i) {
    std::string prompt = shared + written(kind.bytes - shared.size(), std::uint64_t(i) + 2);
    if (kind.ids && !prompt.empty() && prompt.back() == ',') prompt.pop_back();
    prompt = kind.ids ? "[" + prompt + "]" : "\"" + prompt + "\"";
    std::string body = "{\"model\":\"" + model + "\",";
    body += kind.chat ? "\"messages\":[{\"role\":\"user\",\"content\":" : "\"prompt\":";
    const std::size_t at = body.size() + 1;
    body += prompt + (kind.chat ? "}]" : "") + ",\"max_tokens\":" + std::to_string(kind.events) +
            (kind.stream ? ",\"stream\":true}" : ",\"stream\":false}");
    const std::string path = kind.chat ? "/v1/chat/completions" : "/v1/completions";
    const std::string head = "POST " + path +
                             " HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
                             "Authorization: Bearer nobody\r\n" +
                             (kind.session ? "x-session-id: " + std::to_string(i) + "\r\n" : "") +
                             "Content-Length: " +
                             std::to_string(body.size()) + "\r\n\r\n";
    requests.push_back({head + body, head.size() + at});
  }
  return requests;
}

// Makes the prompt the `serial`-th of its kind: 16 letters, or three ids of five digits.
inline void mark(Request& request, bool ids, std::uint64_t serial) {
  for (std::size_t i = 0; i < 16; ++i, serial /= ids ? 9 : 26) {
    char& byte = request.bytes[request.prompt_at + i];
    if (byte != ',') byte = char((ids ? '1' : 'a') + serial % (ids ? 9 : 26));
  }
}

}  // namespace bodies
