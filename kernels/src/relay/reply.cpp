#include "relay/reply.h"

#include <algorithm>
#include <charconv>

namespace kv::relay {

namespace {

constexpr std::string_view kVersion = "HTTP/1.";

// Room before a chunk's bytes for the line with their count: 16 digits and CRLF.
constexpr std::size_t kSizeLine = 18;

// 529: Anthropic's API, and Dynamo with a full queue.
bool is_busy(int status) { return status == 429 || status == 529; }

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
    if (heads_bytes_ + (whole ? stop : text.size()) > limits_.header_bytes) {
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
  if (held_) {
    hold();
    return;
  }
  body_bytes_ = taken;
  if (by_events_) {
    pass_events();
  } else {
    forward_ = data.substr(0, taken);
  }
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
  if (by_events_) pass_events();
}

// Keeps the body: of a reply that failed, while another worker may do better, or where nobody
// else would.
void Reply::hold() {
  for (const std::string_view piece : payload_) held_body_.append(piece);
  if (failed_ && held_body_.size() > limits_.held_bytes) {
    throw Broken(Fault::status_5xx, "the worker's error reply is too long to keep");
  }
  if (!failed_ && held_body_.size() > kept_bytes_) {
    throw garbage("the worker's reply is above " + std::to_string(kept_bytes_) + " bytes");
  }
}

}  // namespace kv::relay
