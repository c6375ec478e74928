// An answer as its bytes come: its head, its body by length or chunks, events and their stamps.
#pragma once

#include "wire.h"

class Answer {
 public:
  enum class State { kHead, kBody, kSize, kChunk, kChunkEnd, kDone, kBad };

  void begin(bool stream) {
    state_ = State::kHead;
    stream_ = stream;
    status = 0;
    events = 0;
    closes = ended_well_ = false;
    text_.clear();
  }

  // Takes what came. `event` is called with each event's stamp in nanoseconds.
  template <typename Event>
  State feed(wire::Inbox& in, Event event) {
    while (state_ != State::kDone && state_ != State::kBad && step(in)) {
    }
    if (stream_) {
      for (std::size_t end; (end = text_.find("\n\n", looked_)) != std::string::npos;) {
        const std::string_view line = std::string_view(text_).substr(0, end);
        if (line == "data: [DONE]") {
          ended_well_ = true;
        } else if (const auto at = line.find(wire::kStampMark); at != line.npos) {
          ++events;
          event(wire::number(line.substr(at + 1, wire::kStampDigits)));
        }
        text_.erase(0, end + 2);
        looked_ = 0;
      }
      looked_ = text_.empty() ? 0 : text_.size() - 1;
    }
    return state_;
  }

  // Whether a finished answer is all that was asked for.
  bool whole(long events_wanted) const {
    if (status != 200) return false;
    if (stream_) return ended_well_ && events == events_wanted && text_.empty();
    return text_.find("\"usage\"") != std::string::npos && text_.back() == '}';
  }

  int status = 0;
  long events = 0;
  bool closes = false;  // the connection ends with it

 private:
  // One piece; false where more must come first.
  bool step(wire::Inbox& in) {
    const std::string_view came = in.view();
    if (state_ == State::kHead) {
      const std::size_t end = came.find("\r\n\r\n");
      if (end == came.npos) return false;
      const std::string_view head = came.substr(0, end);
      if (!head.starts_with("HTTP/1.1 ")) return bad();
      status = int(wire::number(head.substr(9, 3)));
      closes = wire::header(head, "connection") == "close";
      const std::string_view length = wire::header(head, "content-length");
      left_ = wire::number(length);
      state_ = State::kBody;
      if (length.empty()) {
        if (wire::header(head, "transfer-encoding") != "chunked") return bad();
        state_ = State::kSize;
      }
      in.take(end + 4);
      if (state_ == State::kBody && left_ == 0) state_ = State::kDone;
      return true;
    }
    if (state_ == State::kSize) {
      const std::size_t end = came.find("\r\n");
      if (end == came.npos) return false;
      left_ = wire::number(came.substr(0, end), 16);
      in.take(end + 2);
      last_ = left_ == 0;
      state_ = last_ ? State::kChunkEnd : State::kChunk;
      return true;
    }
    if (state_ == State::kChunkEnd) {  // engines and routers here send no trailers
      if (came.size() < 2) return false;
      if (!came.starts_with("\r\n")) return bad();
      in.take(2);
      state_ = last_ ? State::kDone : State::kSize;
      return true;
    }
    const std::size_t count = std::min<std::size_t>(left_, came.size());
    if (count == 0) return false;
    text_ += came.substr(0, count);
    in.take(count);
    left_ -= count;
    if (left_ == 0) state_ = state_ == State::kBody ? State::kDone : State::kChunkEnd;
    return true;
  }

  bool bad() {
    state_ = State::kBad;
    return true;
  }

  State state_ = State::kHead;
  bool stream_ = false, ended_well_ = false, last_ = false;
  std::uint64_t left_ = 0;
  std::string text_;  // of a stream: what is no whole event yet
  std::size_t looked_ = 0;
};
