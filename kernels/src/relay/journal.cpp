#include "relay/journal.h"

#include <algorithm>
#include <utility>

namespace kv::relay {

namespace {

// As in the twin.
constexpr std::size_t kWithheldTokens = 256;
constexpr std::size_t kEventBytes = 1 << 16;
constexpr std::size_t kIdBytes = 12;
constexpr std::int64_t kServerError = 500;

constexpr std::string_view kBlank = " \t\n\r\v\f";
constexpr std::string_view kData = "data:";

// Just after the first empty line at or after `from`, npos where none has come whole.
std::size_t event_end(std::string_view text, std::size_t from) {
  for (std::size_t at = text.find('\n', from); at != std::string_view::npos;
       at = text.find('\n', at + 1)) {
    if (text.substr(at + 1, 1) == "\n") return at + 2;
    if (text.substr(at + 1, 2) == "\r\n") return at + 3;
  }
  return std::string_view::npos;
}

std::string_view stripped(std::string_view text) {
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

}  // namespace

Journal::Journal(std::shared_ptr<const JournalTerms> terms)
    : terms_(std::move(terms)),
      event_bytes_(kEventBytes +
                   kIdBytes * static_cast<std::size_t>(terms_->room->stream_tokens.load())) {}

void Journal::feed(std::string_view payload, std::string& out) {
  std::string_view text = payload;
  std::size_t from = 0;
  const bool carried = !buffer_.empty();
  if (carried) {
    buffer_.append(payload);
    text = buffer_;
    from = searched_;
  }
  std::size_t start = 0;
  while (!failure_) {
    const std::size_t stop = event_end(text, std::max(start, from));
    if (stop == std::string_view::npos) break;
    take(text.substr(start, stop - start), out);
    start = stop;
  }
  if (failure_) return;
  if (carried) {
    buffer_.erase(0, start);
  } else {
    buffer_.assign(text.substr(start));
  }
  searched_ = std::max<std::size_t>(buffer_.size(), 3) - 3;
  if (buffer_.size() <= event_bytes_) return;
  spoil("long_event");
  flush(out);
}

void Journal::flush(std::string& out) {
  out.append(std::exchange(held_, {})).append(std::exchange(buffer_, {}));
  searched_ = 0;
}

void Journal::take(std::string_view event, std::string& out) {
  // A comment, as engines keep connections open by, or no line.
  if (event[0] == ':' || event[0] == '\r' || event[0] == '\n') {
    out.append(event);
    return;
  }
  const bool has_data = event.starts_with(kData);
  const std::string_view data = has_data ? stripped(event.substr(kData.size())) : "";
  if (data == "[DONE]") {
    complete_ = true;
    out.append(std::exchange(held_, {})).append(event);
    return;
  }
  const std::optional<Chunk> chunk = read_chunk(data);
  if (!chunk.has_value()) {
    spoil("unreadable");
    write(event, out);
    return;
  }
  if (chunk->failed) {
    if (is_answer(*chunk)) write(event, out);
    return;
  }
  if (!prefixed_) {
    const std::size_t choices = data.find("\"choices\":");
    prefixed_ = choices != std::string_view::npos;
    if (prefixed_) {
      prefix_ = data.substr(0, choices);
    } else {
      spoil("unreadable");
    }
  }
  if (chunk->choices == 0) {
    usage_sent_ = usage_sent_ || chunk->counted;
    if (fit() && chunk->answer_tokens.has_value()) {
      miscounted_ = *chunk->answer_tokens != static_cast<std::int64_t>(said_.size());
    }
    write(event, out);
    return;
  }
  if (chunk->choices > 1 || chunk->first.index != 0) spoil("several_choices");
  take_choice(event, *chunk, out);
}

void Journal::take_choice(std::string_view event, const Chunk& chunk, std::string& out) {
  const Choice& choice = chunk.first;
  if (choice.given_up && fit()) {
    failure_ = {Fault::early_close, "the worker gave the answer up"};
    return;
  }
  const bool own = choice.prompt.has_value() && !choice.prompt->empty();
  const auto& prompt = own ? choice.prompt : chunk.prompt;
  if (fit()) remember(prompt.has_value() ? &*prompt : nullptr, choice);
  opened_ = opened_ || (choice.opens && !choice.says);
  finished_ = finished_ || choice.ends;
  if (choice.says || choice.ends || withheld_.empty()) {
    write(event, out);
  } else {
    append_without_ids(event, terms_->hidden, held_);
  }
}

void Journal::remember(const std::vector<std::int32_t>* prompt, const Choice& choice) {
  if (prompt != nullptr && prompt_.empty()) {
    prompt_ = *prompt;
    prompt_tokens_ = prompt_.size();
  }
  withheld_.insert(withheld_.end(), choice.ids.begin(), choice.ids.end());
  if (choice.parsed) {
    spoil("parsed");
  } else if (choice.says && (withheld_.empty() || prompt_.empty())) {
    spoil("no_token_ids");
  } else if (choice.says || choice.ends) {
    said_.insert(said_.end(), withheld_.begin(), withheld_.end());
    withheld_.clear();
  } else if (withheld_.size() > kWithheldTokens) {
    spoil("withheld");
  }
  if (!fit()) return;
  const auto kept = static_cast<std::int64_t>(prompt_.size() + said_.size());
  if (terms_->room->take(kept - kept_tokens_, kept)) {
    kept_tokens_ = kept;
  } else {
    spoil("room");
  }
}

// Whether an error is for the client to read; else another worker may do better.
bool Journal::is_answer(const Chunk& chunk) {
  if (fit() && !finished_ && chunk.error_code.value_or(kServerError) >= kServerError) {
    failure_ = {Fault::status_5xx, "the worker sent an error in mid-stream"};
    return false;
  }
  finished_ = true;
  return true;
}

// An event as the client reads it, after those that waited for it.
void Journal::write(std::string_view event, std::string& out) {
  if (!held_.empty()) out.append(std::exchange(held_, {}));
  append_without_ids(event, terms_->hidden, out);
}

std::int64_t Journal::leave_room() { return std::exchange(kept_tokens_, 0); }

// It stays with its worker from here on.
void Journal::spoil(const char* why) {
  if (!fit()) return;
  unfit_ = why;
  terms_->room->give(leave_room());
  prompt_ = said_ = withheld_ = {};
}

}  // namespace kv::relay
