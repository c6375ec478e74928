#include "relay/reply.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace kv::relay {

namespace {

constexpr std::string_view kVersion = "HTTP/1.";

// Room before a chunk's bytes for the line with their count: 16 digits and CRLF.
constexpr std::size_t kSizeLine = 18;

// 529: Anthropic's API, and Dynamo with a full queue.
bool is_busy(int status) { return status == 429 || status == 529; }

// A worker may deny the model itself, which another one has: by 404, SGLang and Triton by 400 too.
bool may_deny(int status) { return status == 400 || status == 404; }

bool is_retryable(int status) {
  return status == 500 || status == 502 || status == 503 || status == 504 || is_busy(status);
}

}  // namespace

void Reply::feed(std::string_view data) {
  forward_ = {};
  body_bytes_ = 0;
  if (!headed()) {
    data = read_heads(data);
    if (!headed() || (data.empty() && !body_.done())) return;
  } else if (buffer_.capacity() > std::string().capacity()) {
    buffer_ = std::string();
  }
  read_body(data);
}

// Takes the reply's head, and any 1xx before it; returns what follows it.
std::string_view Reply::read_heads(std::string_view data) {
  std::size_t searched = buffer_.size() < 3 ? 0 : buffer_.size() - 3;
  std::string_view text = data;
  if (!buffer_.empty()) {
    buffer_.append(data);
    text = buffer_;
  }
  while (!headed()) {
    const std::size_t stop = text.find("\r\n\r\n", searched);
    const bool whole = stop != std::string_view::npos;
    // Without its end, the last three bytes may be of that end.
    const std::size_t least = whole ? stop : text.size() - std::min<std::size_t>(text.size(), 3);
    if (heads_bytes_ + least > limits_.header_bytes) {
      throw garbage("the worker's reply has a head above " +
                    std::to_string(limits_.header_bytes) + " bytes");
    }
    const std::size_t known = std::min(text.size(), kVersion.size());
    if (text.substr(0, known) != kVersion.substr(0, known)) {
      throw garbage("the worker's reply does not begin as HTTP/1.x does");
    }
    if (!whole) {
      if (text.size() != buffer_.size()) buffer_ = std::string(text);
      return {};
    }
    const std::string_view head = text.substr(0, stop + 2);
    const ReplyHead parsed = parse_head(head, head_request_);
    heads_bytes_ += stop + 4;
    text.remove_prefix(stop + 4);
    searched = 0;
    if (parsed.status >= 200) begin_body(head, parsed);
  }
  return text;
}

void Reply::begin_body(std::string_view text, const ReplyHead& head) {
  status_ = head.status;
  framing_ = head.framing;
  reusable_ = head.reusable;
  reason_ = head.reason;
  body_.begin(head, limits_);
  failed_ = is_retryable(head.status);
  held_ = failed_ || kept_bytes_ != 0;
  if (held_) held_head_ = text;
  if (failed_) {
    busy_ = is_busy(head.status) || (head.status == 503 && head.retry_after);
    return;
  }
  meter_.begin(head.event_stream, limits_.tail_bytes);
  if (held_) return;
  if (due_.form != answer::Form::none && head.status == 200 && !head_request_) {
    judge_.begin(due_, head.event_stream, head.coded, limits_.held_bytes);
    withholds_ = true;
    held_head_ = text;
  }
  event_stream_ = head.event_stream && !head.coded;
  if (may_deny(head.status)) {
    denies_ = held_ = true;
    held_head_ = text;
  }
  by_events_ = journal_ != nullptr && answers() && head.event_stream && !head.coded;
  persistent_ = client_.keep_alive && !ends_with_connection();
  head_for_client_ = client_head(head, client_, persistent_, by_events_, ours_at_);
}

// To be asked for once, when the first of the body goes out.
const std::string& Reply::head_for_client() {
  if (by_events_ && journal_->fit() && !journal_->prompt().empty()) {
    head_for_client_.insert(ours_at_, journal_->terms().migratable_line);
  }
  return head_for_client_;
}

void Reply::read_body(std::string_view data) {
  payload_.clear();
  const std::size_t taken = body_.feed(data, payload_);
  surplus_ = surplus_ || taken < data.size();
  if (!failed_) {
    for (const std::string_view piece : payload_) meter_.feed(piece);
  }
  if (denies_) {
    keep(data.substr(0, taken));
    return;
  }
  if (held_) {
    hold();
    return;
  }
  if (!begun()) {
    judge(data.substr(0, taken));
  } else {
    pass(data.substr(0, taken));
  }
}

// Looks for an answer in the bytes that came, and lets them go on where there is one.
void Reply::judge(std::string_view data) {
  std::size_t left = payload_.size();
  for (const std::string_view piece : payload_) {
    judge_.feed(piece, --left == 0 && body_.done());
  }
  if (payload_.empty() && body_.done()) judge_.feed({}, true);
  if (!withholds_) {  // they are its client's already
    pass(data);
    return;
  }
  if (begun() && withheld_.empty()) {
    withholds_ = false;
    pass(data);
    return;
  }
  withheld_.append(data);
  if (judge_.verdict() == answer::Judge::Verdict::failure) {
    withholds_ = false;
    failed_ = held_ = true;
    withheld_ = std::string();
    hold();
    return;
  }
  for (const std::string_view piece : payload_) held_body_.append(piece);
  if (begun() || withheld_.size() > limits_.held_bytes) {
    show();
  }
}

// What waited goes to the client, whatever follows.
void Reply::show() {
  withholds_ = false;
  shown_ = std::exchange(withheld_, {});
  const std::string body = std::exchange(held_body_, {});
  payload_.assign(1, body);
  pass(shown_);
}

void Reply::pass(std::string_view data) {
  body_bytes_ = data.size();
  if (by_events_) {
    pass_events();
  } else {
    forward_ = data;
  }
}

Failure Reply::held_failure() const {
  if (judge_.verdict() == answer::Judge::Verdict::failure) {
    return {Fault::no_answer, std::string("the worker's reply of status 200 ") + judge_.why()};
  }
  return {busy_ ? Fault::busy : Fault::status_5xx,
          "the worker answered with status " + std::to_string(status_)};
}

const char* Reply::flaw() const {
  if (due_.form == answer::Form::none || status_ != 200 || withholds_) return "";
  if (!begun()) return judge_.why();
  return event_stream_ ? answer::late_failure(meter_.tail()) : "";
}

// Keeps a refusal, which may be about the model. A long one is not: its client gets it as it comes.
void Reply::keep(std::string_view data) {
  for (const std::string_view piece : payload_) held_body_.append(piece);
  denial_.append(data);
  if (held_body_.size() <= limits_.held_bytes) return;
  denies_ = held_ = false;
  held_body_ = std::string();
  body_bytes_ = denial_.size();
  forward_ = denial_;
}

// Makes one chunk of the events that have come whole, and the last one where the body is done.
void Reply::pass_events() {
  events_.assign(kSizeLine, ' ');
  for (const std::string_view piece : payload_) {
    if (!journal_->failure()) journal_->feed(piece, events_);
  }
  failure_ = journal_->failure();
  if (!failure_ && body_.done()) end_events();
  std::size_t from = kSizeLine;
  if (events_.size() > kSizeLine) {
    char digits[kSizeLine];
    const auto written =
        std::to_chars(digits, digits + sizeof digits, events_.size() - kSizeLine, 16);
    const auto count = static_cast<std::size_t>(written.ptr - digits);
    from = kSizeLine - 2 - count;
    events_.replace(from, count, digits, count).replace(kSizeLine - 2, 2, "\r\n").append("\r\n");
  }
  if (!failure_ && body_.done()) events_.append("0\r\n\r\n");
  forward_ = std::string_view(events_).substr(from);
}

void Reply::end_events() {
  if (journal_->may_end()) {
    journal_->flush(events_);
  } else {
    failure_ = {Fault::early_close, "the worker ended its stream before the answer"};
  }
}

void Reply::close() {
  body_bytes_ = 0;
  forward_ = {};
  body_.end();
  payload_.clear();
  if (held_) return;
  if (!begun()) {
    judge({});
  } else if (by_events_) {
    pass_events();
  }
}

// Keeps the body: of a reply for which another worker may do better, or where nobody else would.
void Reply::hold() {
  for (const std::string_view piece : payload_) held_body_.append(piece);
  if (failed_ && held_body_.size() > limits_.held_bytes) {
    throw Broken(held_failure().fault, "the worker's error reply is too long to keep");
  }
  if (!failed_ && held_body_.size() > kept_bytes_) {
    throw garbage("the worker's reply is above " + std::to_string(kept_bytes_) + " bytes");
  }
}

}  // namespace kv::relay
