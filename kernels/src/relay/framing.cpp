#include "relay/framing.h"

#include <algorithm>

namespace kv::relay {

namespace {

constexpr std::size_t kMaxSizeDigits = 12;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool all_values(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return is_value_byte(static_cast<unsigned char>(c)); });
}

}  // namespace

void Body::begin(const ReplyHead& head, const Limits& limits) {
  framing_ = head.framing;
  left_ = head.framing == Framing::length ? head.length : 0;
  done_ = framing_ == Framing::none || (framing_ == Framing::length && left_ == 0);
  line_bytes_ = limits.chunk_line_bytes;
  trailer_left_ = limits.header_bytes;
}

std::size_t Body::feed(std::string_view data, Payload& payload) {
  if (framing_ == Framing::chunked) {
    std::size_t at = 0;
    while (at < data.size() && !done_) {
      at = left_ != 0 ? skip_chunk(data, at, payload) : read_line(data, at);
    }
    return at;
  }
  if (framing_ != Framing::close) {
    data = data.substr(0, static_cast<std::size_t>(std::min<std::uint64_t>(data.size(), left_)));
    left_ -= data.size();
    done_ = left_ == 0;
  }
  if (!data.empty()) payload.push_back(data);
  return data.size();
}

std::size_t Body::skip_chunk(std::string_view data, std::size_t at, Payload& payload) {
  const std::size_t size =
      static_cast<std::size_t>(std::min<std::uint64_t>(data.size() - at, left_));
  const std::size_t stop = at + size;
  if (left_ > 2) {
    const std::size_t of_data =
        static_cast<std::size_t>(std::min<std::uint64_t>(size, left_ - 2));
    payload.push_back(data.substr(at, of_data));
    at += of_data;
    left_ -= of_data;
  }
  for (; at < stop; ++at, --left_) {
    if (data[at] != (left_ == 2 ? '\r' : '\n')) {
      throw garbage("a chunk of the worker's reply is longer than its size");
    }
  }
  return stop;
}

std::size_t Body::read_line(std::string_view data, std::size_t at) {
  const std::size_t newline = data.find('\n', at);
  const std::size_t stop = newline == std::string_view::npos ? data.size() : newline + 1;
  std::string_view line = data.substr(at, stop - at);
  const bool too_long = line_.size() + line.size() > line_bytes_ ||
                        (in_trailers_ && line.size() > trailer_left_);
  if (too_long) throw garbage("a chunk line or trailer of the worker's reply is too long");
  if (in_trailers_) trailer_left_ -= line.size();
  const bool carried = !line_.empty();
  if (carried || newline == std::string_view::npos) line_.append(line);
  if (newline == std::string_view::npos) return stop;
  if (carried) line = line_;
  if (line.size() < 2 || line[line.size() - 2] != '\r') {
    throw garbage("a chunk line of the worker's reply ends without CRLF");
  }
  line.remove_suffix(2);
  if (in_trailers_) {
    end_trailer(line);
  } else {
    begin_chunk(line);
  }
  line_.clear();
  return stop;
}

void Body::begin_chunk(std::string_view line) {
  std::uint64_t size = 0;
  std::size_t digits = 0;
  for (; digits < line.size() && hex_digit(line[digits]) >= 0; ++digits) {
    if (digits == kMaxSizeDigits) break;
    size = size * 16 + static_cast<std::uint64_t>(hex_digit(line[digits]));
  }
  line.remove_prefix(digits);
  const std::size_t blank = std::min(line.find_first_not_of(" \t"), line.size());
  line.remove_prefix(blank);
  if (digits == 0 || (!line.empty() && (line[0] != ';' || !all_values(line)))) {
    throw garbage("a chunk of the worker's reply has no readable size");
  }
  if (size != 0) {
    left_ = size + 2;
  } else {
    in_trailers_ = true;
  }
}

void Body::end_trailer(std::string_view line) {
  if (line.empty()) {
    done_ = true;
    return;
  }
  const std::size_t colon = line.find(':');
  const std::string_view name = line.substr(0, colon);
  const bool named = colon != std::string_view::npos && !name.empty() &&
                     std::all_of(name.begin(), name.end(), [](char c) {
                       return is_token_byte(static_cast<unsigned char>(c));
                     });
  if (!named || !all_values(line.substr(colon + 1))) {
    throw garbage("a trailer of the worker's reply is no header");
  }
}

}  // namespace kv::relay
