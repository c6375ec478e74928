#include "request/request_scan.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/chain.h"
#include "base/json_reader.h"
#include "request/chat_text.h"

namespace kv {
namespace {

constexpr std::int64_t kInt32 = (std::int64_t{1} << 31) - 1;
constexpr int kAgentFields = 10;

// A text that is in one piece stays where it is; at the first escape it moves to `room`.
struct Unescaped {
  std::uint8_t* room;
  std::span<const std::uint8_t> text{};
  bool moved = false;

  void run(const std::uint8_t* from, std::size_t size) {
    if (text.empty()) {
      text = {from, size};
      return;
    }
    move();
    std::memcpy(room + text.size(), from, size);
    text = {room, text.size() + size};
  }

  void escaped(std::uint32_t character) {
    move();
    const std::uint8_t* end = write_utf8(room + text.size(), character);
    text = {room, static_cast<std::size_t>(end - room)};
  }

 private:
  void move() {
    if (!moved && !text.empty()) std::memcpy(room, text.data(), text.size());
    moved = true;
  }
};

struct Key {
  std::string_view text;

  void run(const std::uint8_t* from, std::size_t size) {
    text = {reinterpret_cast<const char*>(from), size};
  }
  void escaped(std::uint32_t) { throw Unusual{}; }
};

}  // namespace

// The fields of the body's object, each at most once.
class RequestFields {
 public:
  RequestFields(RequestScan& out, std::span<const std::uint8_t> body, const RequestLimits& limits)
      : out_(out), body_(body), reader_(body), limits_(limits) {}

  void read() {
    reader_.object([&] {
      Key key;
      reader_.string(key);
      reader_.expect(':');
      field(key.text);
    });
    reader_.expect_end();
    finish();
  }

 private:
  enum Field {
    kModel, kStream, kPrompt, kMessages, kTools, kSession, kCacheKey, kUser, kSalt, kPriority,
    kMaxTokens, kMaxCompletionTokens, kChoices, kKwargs, kGeneration, kContinue, kTruncate,
    kAgent, kFields = kAgent + kAgentFields
  };
  static constexpr std::array<std::string_view, kFields> kNames = {
      "model", "stream", "prompt", "messages", "tools", "session_id", "prompt_cache_key", "user",
      "cache_salt", "priority", "max_tokens", "max_completion_tokens", "n",
      "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
      "truncate_prompt_tokens",
      // What agents' clients say of themselves (`router/body/agent_fields.py`).
      "agent_hint", "agentic_context", "client_metadata", "conversation", "litellm_session_id",
      "metadata", "nvext", "safety_identifier", "service_tier", "vllm_xargs"};

  void field(std::string_view key) {
    const auto* const name = std::find(kNames.begin(), kNames.end(), key);
    if (name == kNames.end()) return reader_.skip(2);
    const auto which = static_cast<unsigned>(name - kNames.begin());
    if ((seen_ & 1U << which) != 0) throw Unusual{};
    seen_ |= 1U << which;
    if (!reader_.accept_null()) known(static_cast<Field>(which));
  }

  void known(Field which) {
    switch (which) {
      case kModel: out_.model = name(); return;
      case kStream: out_.stream = reader_.boolean(); return;
      case kPrompt: prompt(); return;
      case kMessages: messages(); return;
      case kTools: tools(); return;
      case kSession: out_.session = name(); return;
      case kCacheKey: out_.cache_key = name(); return;
      case kUser: out_.user = name(); return;
      case kSalt: out_.cache_salt = name(); return;
      case kPriority: out_.priority = reader_.integer(-kInt32 - 1, kInt32); return;
      case kMaxTokens: max_tokens_ = reader_.integer(0, kInt32); return;
      case kMaxCompletionTokens: out_.max_output_tokens = reader_.integer(0, kInt32); return;
      case kChoices: reader_.integer(1, limits_.choices); return;
      case kGeneration:
      case kContinue: reader_.boolean(); return;
      case kKwargs:
        if (reader_.next() != '{') throw Unusual{};
        reader_.skip(2);
        return;
      case kTruncate: throw Unusual{};
      default: agent_field(static_cast<std::size_t>(which)); return;
    }
  }

  // Keeps the value as it stands, for Python to read.
  void agent_field(std::size_t which) {
    const std::uint8_t* begin = reader_.at();
    reader_.skip(2);
    const auto size = static_cast<std::size_t>(reader_.at() - begin);
    out_.agent_fields.push_back({kNames[which], {reinterpret_cast<const char*>(begin), size}});
  }

  std::string name() {
    WholeText sink;
    reader_.string(sink);
    if (static_cast<std::int64_t>(sink.text.size()) > limits_.key_bytes) throw Unusual{};
    return std::move(sink.text);
  }

  // Room for all that the body can become, behind what was written already.
  std::uint8_t* room() {
    if (!out_.written_) {
      out_.written_.reset(new std::uint8_t[body_.size()]);
      end_ = out_.written_.get();
    }
    return end_;
  }

  void prompt() {
    if (reader_.next() == '"') {
      text();
    } else {
      const bool any = reader_.array([&] {
        if (reader_.next() == '"') {
          if (out_.has_ids) throw Unusual{};
          text();
        } else {
          if (out_.prompts > 0) throw Unusual{};
          out_.has_ids = true;
          out_.ids_.push_back(static_cast<std::int32_t>(reader_.integer(0, kInt32)));
        }
      });
      if (!any) throw Unusual{};
    }
    if (out_.has_ids) {
      out_.prompts = 1;
      out_.count(out_.ids_.size());
    }
  }

  void text() {
    Unescaped sink{room()};
    reader_.string(sink);
    if (sink.text.empty() || static_cast<std::int64_t>(out_.prompts) == limits_.prompts) {
      throw Unusual{};
    }
    if (sink.moved) end_ += sink.text.size();
    if (out_.prompts++ == 0) prompt_ = sink.text;
    out_.count(sink.text.size() / 4);
  }

  void messages() {
    ChatText chat(reader_, room());
    out_.messages = chat.messages(static_cast<std::size_t>(limits_.messages));
    messages_ = {end_, static_cast<std::size_t>(chat.end() - end_)};
    end_ = chat.end();
  }

  void tools() {
    ChatText chat(reader_, room());
    chat.tools();
    tools_ = {end_, static_cast<std::size_t>(chat.end() - end_)};
    end_ = chat.end();
  }

  void finish() {
    if (!out_.max_output_tokens) out_.max_output_tokens = max_tokens_;
    if (out_.prompts > 0) {
      out_.text_ = prompt_;
      return;
    }
    if (out_.messages == 0) throw Unusual{};
    conversation();
    out_.count(out_.text_.size() / 4);
  }

  // The tools, then the messages, in one piece: an earlier turn is a prefix of the later one.
  void conversation() {
    out_.text_ = messages_;
    if (tools_.empty()) return;
    if (tools_.data() < messages_.data() &&
        tools_.data() + tools_.size() == messages_.data()) {
      out_.text_ = {tools_.data(), tools_.size() + messages_.size()};
      return;
    }
    const std::size_t size = tools_.size() + messages_.size();
    std::unique_ptr<std::uint8_t[]> joined(new std::uint8_t[size]);
    std::copy(tools_.begin(), tools_.end(), joined.get());
    std::copy(messages_.begin(), messages_.end(), joined.get() + tools_.size());
    out_.written_ = std::move(joined);
    out_.text_ = {out_.written_.get(), size};
  }

  RequestScan& out_;
  std::span<const std::uint8_t> body_;
  JsonReader reader_;
  const RequestLimits& limits_;
  std::uint8_t* end_ = nullptr;  // of what was written
  unsigned seen_ = 0;
  std::optional<std::int64_t> max_tokens_;
  std::span<const std::uint8_t> prompt_;
  std::span<const std::uint8_t> messages_;
  std::span<const std::uint8_t> tools_;
};

RequestScan::RequestScan(std::span<const std::uint8_t> body, const RequestLimits& limits) {
  RequestFields(*this, body, limits).read();
}

void RequestScan::chain(std::size_t block_size, std::uint64_t seed, std::uint64_t* chain) const {
  chain_hashes(first().data(), block_size * 4, blocks(block_size), seed, chain);
}

std::span<const std::uint8_t> RequestScan::first() const {
  if (!has_ids) return text_;
  return {reinterpret_cast<const std::uint8_t*>(ids_.data()), ids_.size() * sizeof(ids_[0])};
}

void RequestScan::count(std::size_t prompt_tokens) {
  const std::size_t counted = std::max<std::size_t>(prompt_tokens, 1);
  tokens += counted;
  longest_tokens = std::max(longest_tokens, counted);
}

}  // namespace kv
